"""Static activation scales: the largest input of every quantized linear, in all that it reads.

Steps 2 .. K of a chain feed the draft's own hidden states, not the target's, so the first step
alone gives scales that clip the later ones. The key and value projections of a block draft read the
fused features of the context and the normed rows of the block, two distributions under one scale.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.drafts.fused import fused_group
from ...quantize.numerics.fp4 import nvfp4_global_scale
from ...quantize.numerics.fp8 import fp8_scale
from ...quantize.stored.loading import LoadedDraft
from ...recipes import ActivationFormat
from ..errors import CalibrationError
from ..traces.trace_folder import TraceFolder
from .trace_runs import never_run, run_over_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScale:
    """Statistics of one linear's input: `absmax`, and the `scale` that `stored_scale` makes of it.

    Linears that engines fuse (q/k/v, gate/up) read one tensor and get one scale.
    """

    absmax: float
    scale: float


FP8_PER_TENSOR = ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False)


def stored_scale(absmax: float, activations: ActivationFormat) -> float:
    """What a linear stores of its input: a power of two, so large that absmax is not clipped.

    That is at least absmax / 448 (FP8) or absmax / (6 * 448) (NVFP4, whose is the global scale of
    the scales of groups, as for weights), and below twice as much. ModelOpt 0.47 stores the
    quotient itself (`get_activation_scaling_factor`), and which calibration prompts were taken
    then decides where every value stands between two codes. FP8 has the same precision in every
    octave, so nothing is won by that: measured on the shipped pairs, alignments differ by as much
    as two measurements of the same thing do (0.3 %). Powers of two leave the mantissas alone:
    other prompts give the same scale, and the same codes wherever nothing is clipped and no code
    is subnormal. Nor is it worth it to choose by divergence: of NVFP4's inputs, on a shipped pair,
    2, 4 and 16 times the scale give the same 3.530e-3 nats to the last digit, the quotient 3.542,
    ModelOpt's headroom 3.509, three drawn at random above the quotient 3.444 to 3.481, and a half,
    which clips, 5.457. Zero absmax gives 1.
    """
    rule = nvfp4_global_scale if activations.number.global_scale else fp8_scale
    mantissa, exponent = math.frexp(float(rule(torch.tensor(absmax))))  # mantissa in [0.5, 1)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


class _AbsmaxObserver:
    """`OnInput` that keeps the largest magnitude per linear and changes nothing."""

    def __init__(self) -> None:
        self.absmax: dict[str, float] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        low, high = x.aminmax()
        # max() drops a NaN that comes second: keep it for the check at the end.
        found = [self.absmax.get(name, 0.0), float(high), -float(low)]
        self.absmax[name] = math.nan if any(map(math.isnan, found)) else max(found)
        return x


def measure_input_scales(
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    activations: ActivationFormat = FP8_PER_TENSOR,
    others: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Mapping[str, InputScale]:
    """Take the absmax of every attention and MLP input over all that K draft tokens need.

    The draft runs without activation rounding, on every position of the prompts and continuations,
    teacher-forced exactly as replay does it.

    Args:
        draft: the draft to quantize, in BF16 or wider values.
        traces: recorded for calibration, not the ones that the gate judges on.
        num_draft_tokens: K, as it will be served.
        others: "fc" or "lm_head", where they store a scale too.
        on_progress: called with (work done, work).

    Returns:
        Canonical module name -> scale, for every linear of `draft.linears` and `others`.

    Raises:
        TraceError: the traces do not fit the draft.
        CalibrationError: the draft cannot propose K tokens, no trace is long enough, or an input
            is NaN or infinite.
    """
    observer = _AbsmaxObserver()
    forward = draft.family.forward(draft.geometry, draft.weights, observer)
    run_over_traces(
        forward, draft, traces, num_draft_tokens=num_draft_tokens, on_progress=on_progress
    )
    absmax = {name: observer.absmax.get(name) for name in (*draft.linears, *others)}
    for name, value in absmax.items():
        if value is None:
            raise never_run(traces, name, num_draft_tokens)
        if not math.isfinite(value):
            raise CalibrationError(
                draft.name,
                f"{name}: an input is NaN or infinite",
                fix="check the draft's weights for NaN and infinity, and export it again",
            )
    found = {name: value for name, value in absmax.items() if value is not None}
    return _with_scales(found, activations)


def _with_scales(
    absmax: Mapping[str, float], activations: ActivationFormat
) -> Mapping[str, InputScale]:
    """One scale per group of fused linears, the largest of its members."""
    largest: dict[tuple[str, str], float] = {}
    for name, value in absmax.items():
        group = fused_group(name)
        largest[group] = max(largest.get(group, 0.0), value)
    scales: dict[str, InputScale] = {}
    for name in absmax:
        value = largest[fused_group(name)]
        scales[name] = InputScale(absmax=value, scale=stored_scale(value, activations))
    return scales
