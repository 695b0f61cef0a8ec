"""Traces as a target of a real draft's width could leave them, for a draft of random weights.

No target of that width serves this purpose, so features are made to suit the chain of the draft,
and some of its proposals are right. A feature tells the next token but one: the row of the head of
that token, sent back through fc, under noise whose strength differs by position as margins of real
drafts do. The text repeats tokens for a while, so that later tokens have something to follow
from.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....calibration.passes.draft_inputs import default_aux_layer_ids
from ....calibration.recording.decoding import GREEDY
from ....calibration.traces.manifest import FeatureSpec, TargetIdentity
from ....calibration.traces.prompt_trace import PromptTrace
from ....calibration.traces.writer import trace_output
from ....quantize.files.checkpoint import Checkpoint
from ....quantize.stored.loading import read_weight
from ....quantize.stored.stored_draft import StoredDraft
from .configs import INITIALIZER_RANGE

PROMPT_LENGTH = 32
"""Prompt tokens of the traces, or half of all if that is less; the rest is continuation."""
NUM_LAYERS = 61
"""Layers of the target that the features are said to come from."""
STAYS = 0.85
"""Share of tokens that repeat the one before them."""
STRENGTH, SPREAD = 2.0, 0.8
"""Strength of the signal in a feature: median, 1 = it is as often the best logit as not, and the
spread of its logarithm."""
OWN = 0.6
"""Strength of the feature's own token in it, in units of the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSize:
    """The amount of text.

    Attributes:
        prompts: how many. tokens: of each, prompt and continuation.
        seed: of text and features; another seed gives other ones.
    """

    prompts: int
    tokens: int
    seed: int

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt that were given."""
        return min(PROMPT_LENGTH, self.tokens // 2)


def write_traces(draft: Path, out: Path, size: TraceSize) -> None:
    """Write a trace folder that fits a draft of random weights: a chain with embedding and head."""
    stored = StoredDraft.read(Checkpoint.open(draft))
    geometry = stored.draft.geometry
    identity = TargetIdentity(
        name="made for a draft of random weights",
        config_sha256=None,
        weights_sha256=None,
        num_layers=NUM_LAYERS,
        vocab_size=geometry.vocab_size,
    )
    spec = FeatureSpec(
        kind="aux",
        width=geometry.num_aux_layers * geometry.target_hidden_size,
        dtype="bfloat16",
        aux_layer_ids=geometry.aux_layer_ids or default_aux_layer_ids(NUM_LAYERS),
        fusion_sha256=None,
    )
    generator = torch.Generator().manual_seed(size.seed)
    texts = _repeating(geometry.vocab_size, size, generator)
    features = _telling(stored, texts, _noise(spec.width, size, generator), generator)
    with trace_output(out, GREEDY.manifest(identity, spec)) as writer:
        for i, (text, feature) in enumerate(zip(texts, features, strict=True)):
            trace = PromptTrace(
                id=f"p{size.seed}-{i}",
                category="all",
                prompt_length=size.prompt_length,
                token_ids=text,
                features=feature,
                target_top1=text[1:],
            )
            writer.add(trace, position=i)


def _noise(width: int, size: TraceSize, generator: torch.Generator) -> Iterator[Tensor]:
    """[tokens - 1, width] BF16 of each prompt: some channels are far wider, as in real models."""
    channels = torch.randn(width, generator=torch.Generator().manual_seed(0)).mul_(0.7).exp_()
    channels /= channels.square().mean().sqrt()
    for _ in range(size.prompts):
        drawn = torch.randn((size.tokens - 1, width), generator=generator)
        yield drawn.mul_(channels).bfloat16()


def _repeating(vocab_size: int, size: TraceSize, generator: torch.Generator) -> Tensor:
    """[prompts, tokens] int64: a token stays for a while, and another one follows."""
    shape = (size.prompts, size.tokens)
    drawn = torch.randint(vocab_size, shape, generator=generator)
    changes = torch.rand(shape, generator=generator) >= STAYS
    changes[:, 0] = True
    places = torch.arange(size.tokens).where(changes, 0).cummax(dim=1).values
    return drawn.gather(1, places)


def _telling(
    stored: StoredDraft, texts: Tensor, noise: Iterable[Tensor], generator: torch.Generator
) -> Iterator[Tensor]:
    """Features of each text that tell the next token but one: noise, and fc^T of a row of the head.

    fc fc^T is nearly a multiple of the identity, since weights are independent: fc turns it back
    into the row.
    """
    fc, head, embedding = (
        _weight(stored, f"{name}.weight") for name in ("fc", "lm_head", "embed_tokens")
    )
    gain = fc[:64].float().square().sum(1).mean()
    median = STRENGTH * _least_signal(*head.shape)
    for text, drawn in zip(texts, noise, strict=True):
        strength = torch.randn(len(text) - 1, 1, generator=generator).mul_(SPREAD).exp_()
        said = _unit(head[torch.cat((text[2:], text[-1:]))]) * strength * median
        own = _unit(embedding[text[:-1]]).repeat(1, fc.shape[1] // fc.shape[0]) * OWN
        yield (drawn + (said.bfloat16() @ fc).float() / gain + own).bfloat16()


def _least_signal(vocab_size: int, width: int) -> float:
    """Root mean square of a row of the head in the last hidden state, for the largest logit.

    Its logit must reach the largest of as many normal ones as there are other rows, and the rest of
    the hidden state is what fc makes of the noise, and about as much again from attention and MLP.
    """
    others = math.hypot(INITIALIZER_RANGE * math.sqrt(3 * width), 0.0007 * width)
    return others * math.sqrt(2 * math.log(vocab_size) / width)


def _unit(rows: Tensor) -> Tensor:
    """Rows of root mean square 1, float32."""
    return rows.float() / rows.float().square().mean(1, keepdim=True).sqrt()


def _weight(stored: StoredDraft, canonical: str) -> Tensor:
    (row,) = (row for row in stored.draft.rows if row.canonical == canonical)
    return read_weight(stored, row, torch.bfloat16, device=torch.device("cpu"))
