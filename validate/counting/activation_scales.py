"""What static activation scales are worth in accepted tokens, and how much of that is chance.

Multiplying a scale by a number between 1 and 2 clips nothing and fades nothing: it only moves every
value against the codes. Acceptance changes all the same. That spread is the yardstick for any
difference between scales: what is smaller than it is not a better calibration.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.stored.activations import InputRounding
from ...quantize.stored.loading import LoadedDraft
from .draft_replay import DraftReplay
from .trace_replay import replay_drafts

NUM_ALIGNMENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleComparison:
    """Relative changes of the mean acceptance length by rounding activations to FP8, nothing else.

    Attributes:
        unrounded: mean acceptance length without rounding.
        per_token: with a scale per token, as dynamic formats have it.
        measured: with the scales measured. one: with the constant 1.0.
        alignments: with 1.0 * 2^(i/8), i = 0 .. 7.
    """

    unrounded: float
    per_token: float
    measured: float
    one: float
    alignments: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Standard deviation of the alignments."""
        return statistics.stdev(self.alignments)

    @property
    def gain(self) -> float:
        """Of the measured scales over the constant."""
        return self.measured - self.one

    @property
    def gains_nothing(self) -> bool:
        """Whether the gain lies within what alignment alone makes."""
        return self.gain <= 2 * self.spread


def compare_scales(
    draft: LoadedDraft,
    traces: TraceFolder,
    scales: Mapping[str, float],
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> ScaleComparison:
    """Replay a draft with its inputs rounded to FP8 under several scales.

    Args:
        draft: in BF16 or wider values.
        traces: those that the scales were measured on, or others.
        scales: canonical module name of every linear -> its measured scale.
        num_draft_tokens: K.
        on_progress: called with (work done, work).

    Raises:
        TraceError, ReplayError: see `replay_drafts`.
    """
    constants = [2.0 ** (i / NUM_ALIGNMENTS) for i in range(NUM_ALIGNMENTS)]
    static = [scales, *(dict.fromkeys(scales, constant) for constant in constants)]
    drafts = [draft, _per_token(draft, scales), *(_rounded(draft, one) for one in static)]
    replays = replay_drafts(
        drafts, traces, num_draft_tokens=num_draft_tokens, on_progress=on_progress
    )
    unrounded = _length(replays[0])
    per_token, measured, *alignments = [_length(one) / unrounded - 1 for one in replays[1:]]
    return ScaleComparison(
        unrounded=unrounded,
        per_token=per_token,
        measured=measured,
        one=alignments[0],
        alignments=tuple(alignments),
    )


def _length(replay: DraftReplay) -> float:
    return replay.counts.mean_acceptance_length


def _per_token(draft: LoadedDraft, scales: Mapping[str, float]) -> LoadedDraft:
    return _with(draft, InputRounding(dict.fromkeys(scales, "token-dynamic"), {}, None))


def _rounded(draft: LoadedDraft, scales: Mapping[str, float]) -> LoadedDraft:
    tensors = {name: torch.tensor(scale, device=draft.device) for name, scale in scales.items()}
    return _with(draft, InputRounding(dict.fromkeys(scales, "tensor-static"), tensors, None))


def _with(draft: LoadedDraft, rounding: InputRounding) -> LoadedDraft:
    forward = draft.family.forward(draft.geometry, draft.weights, rounding)
    rounded = dataclasses.replace(draft, forward=forward)
    return rounded.with_cache(draft.cache_scales) if draft.cache_scales else rounded
