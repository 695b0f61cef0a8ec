"""The norm before a target's head, for drafts that read the state behind it.

An engine hands out what its layers give, before that norm. It divides by the root mean square in
every target that such drafts are made for, and multiplies by its weight, or by 1 + weight (Gemma,
Qwen3-Next). Which of the two, and whether anything else stands there, is shown by how likely the
target was to say what it said.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...quantize.drafts.config_reader import ConfigReader, with_text_config
from ...quantize.drafts.maths import linear
from ...quantize.files.checkpoint import CONFIG_FILE
from ..errors import TraceError
from ..traces.head_agreement import MAX_ROWS
from ..traces.target_tables import FINAL_NORM, HEAD, TargetTables
from .decoding import Decoding, processed_logprobs

MAX_GAP = 0.05
"""Nats, median; two engines in BF16 differ by 0.005 (tests/served/RECORDED.md)."""
_FIX = "record with transformers: draftquant record --draft DRAFT --fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastNorm:
    """The norm, as it is served.

    Attributes:
        scale: [W] float32, by which the states are multiplied after the division.
        eps: added to the mean square.
    """

    scale: Tensor
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        """States [n, W] behind it, in their own dtype."""
        x = states.float()
        root = (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (x * root * self.scale).to(states.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a target wrote, and from which states.

    Attributes:
        states: [n, W] behind its last layer, before the norm.
        token_ids: [n] int64, what it wrote there. logprob: [n] float32, how likely that was.
    """

    states: Tensor
    token_ids: Tensor
    logprob: Tensor


def shown_norm(target: Path, written: Iterable[Written], decoding: Decoding) -> LastNorm:
    """The norm under which the target's head gives its tokens the probabilities that they had.

    Args:
        written: texts, of which the first few hundred tokens are looked at.

    Raises:
        TraceError: no norm is found beside the embedding, or the probabilities are others.
        CheckpointError: the target's tables or its rms_norm_eps are not found.
    """
    tables = TargetTables.find(target)
    keys = ConfigReader(with_text_config(tables.checkpoint.config), target / CONFIG_FILE)
    eps, shared = keys.number("rms_norm_eps"), tables.shared(None)
    if FINAL_NORM not in shared:
        raise TraceError(target, "the target has no norm.weight beside its embedding", fix=_FIX)
    weight, head = shared[FINAL_NORM].float(), shared[HEAD]
    said = _first_rows(written)

    def gap(norm: LastNorm) -> float:
        """Nats between what this norm says of the tokens and what was recorded."""
        logprobs = processed_logprobs(linear(norm(said.states).float(), head), decoding)
        own = logprobs.gather(1, said.token_ids[:, None])[:, 0]
        return float((own - said.logprob).abs().median())

    norm = min((LastNorm(scale=scale, eps=eps) for scale in (weight, 1 + weight)), key=gap)
    if not gap(norm) <= MAX_GAP:
        raise TraceError(
            target,
            f"computed from the recorded states, the target's tokens are {gap(norm):.2f}"
            " nats more or less likely than the engine reported: something else than a"
            " norm stands between its layers and its head",
            fix=_FIX,
        )
    return norm


def _first_rows(written: Iterable[Written]) -> Written:
    """The first rows of all that was written, as one."""
    texts: list[Written] = []
    for text in written:
        texts.append(text)
        if sum(len(one.token_ids) for one in texts) >= MAX_ROWS:
            break
    return Written(
        states=torch.cat([text.states for text in texts])[:MAX_ROWS],
        token_ids=torch.cat([text.token_ids for text in texts])[:MAX_ROWS],
        logprob=torch.cat([text.logprob for text in texts])[:MAX_ROWS],
    )
