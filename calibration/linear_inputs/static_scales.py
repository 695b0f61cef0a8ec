"""Static input scales of a plan, by the names on disk: measured on traces, or one constant.

Steps 2 .. K of a chain feed the draft's own hidden states, not the target's, so scales from the
first step alone clip the later ones. The key and value projections of a block draft read the
fused features of the context and the normed rows of the block, two distributions under one scale.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...quantize.drafts.forward import BLOCK_ROWS, DraftForward
from ...quantize.making.preparing import balanced_norms
from ...quantize.numerics.number_formats import fp8_scale, nvfp4_global_scale
from ...quantize.planning.quantization_plan import MeasuredInputs, Plan
from ...recipes import ActivationFormat
from ...recipes.errors import BackendError, CalibrationError
from ...recipes.listener import Progress, unseen
from ..passes.draft_inputs import DraftRun, first_hidden_of_batch, work_of
from ..traces.held_out import seen_prompts
from ..traces.manifest import TraceEntry

MAX_TOKENS = 2048  # of prompts that go through a draft together


def run_over_traces(
    forward: DraftForward, run: DraftRun, *, row_stride: int = 1, on_progress: Progress = unseen
) -> None:
    """Draft K tokens from every position of the continuations, teacher-forced as in replay.

    The `OnInput` of `forward` sees every input: that of fc where the traces hold the target's
    features, that of the head after each pass. Prompts of equal lengths go through it together.
    """
    run.check()
    draft, traces = run.draft, run.traces
    batches = _equally_long(traces.manifest.prompts)
    work = [work_of(batch, run.num_draft_tokens) for batch in batches]
    for done, batch in zip(accumulate(work), batches, strict=True):
        prompts = [traces.load(entry) for entry in batch]
        with torch.inference_mode():
            passes = forward.passes(
                first_hidden_of_batch(draft, traces, prompts, forward),
                torch.stack([prompt.token_ids for prompt in prompts]).to(draft.device),
                rows=run.rows(batch[0])[::row_stride],
                num_draft_tokens=run.num_draft_tokens,
                block_rows=min(BLOCK_ROWS, max(1, MAX_TOKENS // len(batch))),
            )
            for step in passes:
                forward.head_input(step.hidden)
        on_progress(done, sum(work))


def _equally_long(entries: Sequence[TraceEntry]) -> list[list[TraceEntry]]:
    """Prompts that go through a draft together, of equal lengths, so that nothing is padded.

    Observers of inputs would see the padding, and experts do not tell which token an input comes
    from.
    """
    batches: list[list[TraceEntry]] = []
    open_ones: dict[tuple[int, int], list[TraceEntry]] = {}
    for entry in entries:
        lengths = entry.prompt_length, entry.num_tokens
        batch = open_ones.get(lengths)
        if batch is None or (len(batch) + 1) * entry.num_tokens > MAX_TOKENS:
            batch = open_ones[lengths] = []
            batches.append(batch)
        batch.append(entry)
    return batches


def never_run(run: DraftRun, name: str) -> CalibrationError:
    """The error for a linear that no input has reached."""
    where = f"{run.traces.folder}: {name}"
    if name == "fc" and run.traces.manifest.features.kind == "fused":
        what = "the traces hold the outputs of this linear (fused features), not its inputs"
        fix = "record traces without --fused, or keep fc in the recipe"
        return CalibrationError(where, what, fix=fix)
    return CalibrationError(
        where,
        "the traces do not reach this linear: no continuation is longer than"
        f" {run.num_draft_tokens} tokens",
        fix="record longer continuations: --max-new-tokens",
    )


def stored_scale(absmax: float, activations: ActivationFormat) -> float:
    """What a linear stores for its input: a power of two, large enough not to clip absmax.

    That is at least absmax / 448 (FP8) or absmax / (6 * 448) (NVFP4, where it is the global scale
    over those of groups), and below twice as much. ModelOpt 0.47 stores the quotient itself
    (`get_activation_scaling_factor`); then the calibration prompts determine where every value
    lies between two codes. FP8 has the same precision in every octave, so that gains nothing: on
    the shipped pairs, alignments differ by as much as two measurements of the same thing do
    (0.3 %). Powers of two leave the mantissas alone: other prompts give the same codes wherever
    nothing is clipped and no code is subnormal. Nor does choosing by divergence pay: for NVFP4's
    inputs, on a shipped pair, all larger scales give 3.444e-3 to 3.542e-3 nats, and a clipping
    half 5.457e-3. Zero absmax gives 1.
    """
    rule = nvfp4_global_scale if activations.number.global_scale else fp8_scale
    return octave_above(float(rule(torch.tensor(absmax))))


def octave_above(x: float) -> float:
    """The smallest power of two that is not smaller; 1 for zero."""
    if x == 0:
        return 1.0
    mantissa, exponent = math.frexp(x)  # mantissa in [0.5, 1)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def measure_absmax(
    run: DraftRun, *, others: Sequence[str] = (), on_progress: Progress = unseen
) -> Mapping[str, float]:
    """The largest magnitude of every attention and MLP input over all that K draft tokens need.

    The draft runs without activation rounding, on every position of the prompts and continuations.
    By canonical module name, for every linear of `draft.linears` and `others`: "fc" or "lm_head".
    Linears that engines fuse (q/k/v, gate/up) read one tensor and share the largest.
    """
    draft, seen = run.draft, dict[str, Tensor]()

    def observe(name: str, x: Tensor) -> Tensor:
        largest = torch.stack(x.aminmax()).abs().amax()  # of NaN, NaN
        seen[name] = torch.maximum(seen.get(name, largest), largest)
        return x

    forward = draft.family.forward(draft.geometry, draft.weights, observe)
    run_over_traces(forward, run, on_progress=on_progress)
    names, largest = (*draft.linears, *others), dict[tuple[str, str], float]()
    for name in names:
        if name not in seen:
            raise never_run(run, name)
        if not math.isfinite(seen[name]):
            fix = "its weights are finite, but too large to compute with: export it again"
            raise CalibrationError(draft.name, f"{name}: an input is NaN or infinite", fix=fix)
        group = draft.family.scale_group(name)
        largest[group] = max(largest.get(group, 0.0), float(seen[name]))
    return {name: largest[draft.family.scale_group(name)] for name in names}


def constant_scales(plan: Plan, scale: float) -> MeasuredInputs:
    """One scale for all quantized linears, from `--input-scale`."""
    if not 0 < scale < math.inf:
        what = f"expected a positive number, got {scale}"
        raise BackendError("--input-scale", what, fix="give a positive number, such as 1.0")
    scales = dict.fromkeys((step.row.module for step in plan.quantized), scale)
    return MeasuredInputs(input_scales=scales, input_scale_origin="--input-scale")


def calibrated_scales(plan: Plan, run: DraftRun, on_progress: Progress = unseen) -> MeasuredInputs:
    """The scales of all linears whose format stores one, measured along the traces."""
    names = {
        step.row.canonical.removesuffix(".weight"): step
        for step in plan.quantized
        if plan.format_of(step).needs_input_scale
    }
    others = [name for name in names if name not in run.draft.linears]
    absmax = measure_absmax(balanced_run(run, plan), others=others, on_progress=on_progress)
    scales = {
        step.row.module: stored_scale(absmax[name], activations)
        for name, step in names.items()
        if (activations := plan.format_of(step).activations)
    }
    origin = f"traces sha256 {run.traces.sha256}, num_draft_tokens {run.num_draft_tokens}"
    prompts = seen_prompts(run.traces)
    return MeasuredInputs(input_scales=scales, input_scale_origin=origin, prompts=prompts)


def balanced_run(run: DraftRun, plan: Plan) -> DraftRun:
    """The draft as the plan will balance its concat input: other inputs, the same outputs."""
    balanced = balanced_norms(plan)
    if plan.balanced is None or not balanced:
        return run
    norm, linears = plan.balanced
    factor = 2.0 ** balanced[norm.row.tensor.name]
    weights = dict(run.draft.weights)
    weights[norm.row.canonical] = weights[norm.row.canonical] / factor
    for step in linears:
        weight = weights[step.row.canonical].clone()
        weight[:, : weight.shape[1] // 2] *= factor
        weights[step.row.canonical] = weight
    return dataclasses.replace(run, draft=dataclasses.replace(run.draft, weights=weights))
