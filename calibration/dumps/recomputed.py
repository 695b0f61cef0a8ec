"""Which layers a dump holds, found by recomputing a few positions with the target itself.

Our own recorder gives the outputs of all layers for the beginnings of a few texts. Each slot of the
dump is one of them, up to the arithmetic of another engine; another layer is far off.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import TraceError
from ..prompts.prompt_file import Prompt
from ..recording.record_traces import record_traces
from ..traces.manifest import FeatureDtype, TargetIdentity
from ..traces.prompt_trace import PromptTrace
from .dump_answers import Answer
from .head import SHIFTS

MAX_TEXTS, MAX_TOKENS = 4, 160
MAX_DIFFERENCE = 0.1
"""Relative, median over positions. Engines in BF16 differ by 0.02 or less, other layers by 0.2."""
CLEARLY = 2.0
"""Times that the next best layer is farther."""
MIN_OWN = 0.9
"""Tokens that are the target's argmax, near ties aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedFinding:
    """What recomputing showed.

    Attributes:
        target: with the hash of its weights. dtype: that it computed in.
        layer_ids: of each slot, 0-based, outputs.
        shift: row i belongs to token i + shift.
        difference: largest of the slots, relative, median over positions.
        own: share of the answers' tokens that are the target's argmax; None where the beginnings
            hold no answer.
    """

    target: TargetIdentity
    dtype: FeatureDtype
    layer_ids: tuple[int, ...]
    shift: int
    difference: float
    own: float | None


def recompute(
    target: Path, answers: Sequence[Answer], *, num_layers: int, width: int, dtype: FeatureDtype
) -> RecomputedFinding:
    """Run the target on the beginnings of some texts and find the dump's slots among its layers.

    Args:
        answers: of different samples; the first few are looked at.
        width: W; a sample's aux features are m slots of this width.

    Raises:
        TraceError: the target cannot be run; or it can, and a slot is the output of none of its
            layers (`TraceError.where` is then the dump's folder).
    """
    answers = answers[:MAX_TEXTS]
    prompts = [
        Prompt(id=str(i), category="all", token_ids=tuple(_beginning(answer).tolist()))
        for i, answer in enumerate(answers)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        traces = record_traces(
            target,
            prompts,
            Path(scratch) / "layers",
            max_new_tokens=1,
            aux_layer_ids=range(num_layers),
            dtype=dtype,
        )
        recorded = list(traces)
    pairs = list(zip(answers, recorded, strict=True))
    apart = {
        # The median, as one text with the rows of another must not hide the layers of the rest.
        shift: torch.stack([_apart(*both, shift, width) for both in pairs]).median(dim=0).values
        for shift in SHIFTS
    }
    shift = min(apart, key=lambda s: float(apart[s].min(dim=1).values.mean()))
    nearest, layer_ids = apart[shift].min(dim=1)
    _check_clear(answers[0].sample.file.parent, apart[shift])
    return RecomputedFinding(
        target=traces.manifest.target,
        dtype=dtype,
        layer_ids=tuple(layer_ids.tolist()),
        shift=shift,
        difference=float(nearest.max()),
        own=_own(answers, recorded),
    )


def _beginning(answer: Answer) -> Tensor:
    """As much as shows some tokens of the answer, within bounds."""
    return answer.sample.token_ids[: min(answer.stop, MAX_TOKENS)]


def _apart(answer: Answer, trace: PromptTrace, shift: int, width: int) -> Tensor:
    """[m, layers]: relative difference of each slot and each layer, median over positions."""
    count = trace.prompt_length - abs(shift)
    slots = slots_of(answer.sample.aux, width)[max(-shift, 0) :][:count].float()
    layers = slots_of(trace.features, width)[max(shift, 0) :][:count].float()
    differences = [
        (slot[:, None] - layers).norm(dim=2) / layers.norm(dim=2).clamp(min=1e-9)
        for slot in slots.unbind(1)
    ]
    return torch.stack(differences).median(dim=1).values


def slots_of(features: Tensor, width: int) -> Tensor:
    """[N, m, W] of [N, m * W]."""
    return features.reshape(len(features), -1, width)


def _check_clear(where: Path, apart: Tensor) -> None:
    """Raise unless every slot is one layer and clearly no other."""
    for slot, differences in enumerate(apart):
        ordered = differences.sort()
        nearest = float(ordered.values[0])
        next_best = float(ordered.values[1]) if len(differences) > 1 else float("inf")
        if not nearest <= MAX_DIFFERENCE or next_best < CLEARLY * nearest:
            raise TraceError(
                where,
                f"slot {slot} of the aux features equals the output of none of the target's"
                f" {len(differences)} layers: layer {int(ordered.indices[0])} is the nearest,"
                f" and differs by {nearest:.0%}; the next one by {next_best:.0%}",
                fix="give the target that was dumped, and a dump of the outputs of its layers",
            )


def _own(answers: Sequence[Answer], recorded: Sequence[PromptTrace]) -> float | None:
    hits = [
        trace.target_top1[answer.start - 1 : trace.prompt_length - 1]
        == trace.token_ids[answer.start : trace.prompt_length]
        for answer, trace in zip(answers, recorded, strict=True)
    ]
    joined = torch.cat(hits)
    return float(joined.double().mean()) if len(joined) else None
