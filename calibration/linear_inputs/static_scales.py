"""Static input scales of a plan, by the names on disk: measured on traces, or one constant."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...quantize.changed_norms import balanced_norms
from ...quantize.errors import BackendError
from ...quantize.quantization_plan import Plan
from ...quantize.stored.loading import LoadedDraft
from ...recipes import ActivationFormat, Recipe
from ...recipes.seen_prompts import NO_PROMPTS, SeenPrompts
from ..traces.recorded_prompts import seen_prompts
from ..traces.trace_folder import TraceFolder
from .input_scales import measure_input_scales, stored_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticScales:
    """What `quantize_draft` stores.

    Attributes:
        scales: one per linear that stores one, by on-disk module name; more do not harm.
        origin: where they came from, for provenance.
        prompts: that were looked at.
    """

    scales: Mapping[str, float]
    origin: str
    prompts: SeenPrompts = NO_PROMPTS


def constant_scales(plan: Plan, scale: float) -> StaticScales:
    """One scale for all quantized linears, as `--input-scale` gives it.

    Raises:
        BackendError: it is not a positive number.
    """
    if not 0 < scale < math.inf:
        raise BackendError(
            "--input-scale",
            f"expected a positive number, got {scale}",
            fix="give a positive number, such as 1.0",
        )
    scales = dict.fromkeys((step.row.module for step in plan.quantized), scale)
    return StaticScales(scales=scales, origin="--input-scale")


def static_activations(recipe: Recipe) -> ActivationFormat:
    """The format of activations that scales are to be measured for.

    Raises:
        BackendError: the recipe stores no static scales.
    """
    if recipe.activations is None or not recipe.needs_input_scales:
        raise BackendError(
            "--traces",
            f"there is nothing to calibrate: recipe {recipe.name} stores no static input scales",
            fix="leave --traces out, or use a recipe with static activations (blackwell-fp8)",
        )
    return recipe.activations


def calibrated_scales(
    plan: Plan,
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> StaticScales:
    """The scales of all linears whose format stores one, measured along the traces.

    Args:
        draft: to quantize, in BF16 or wider values.
        num_draft_tokens: K, as it will be served.
        on_progress: called with (work done, work).

    Raises:
        BackendError: the recipe stores no static scales.
        TraceError, CalibrationError: see `measure_input_scales`.
    """
    steps = [step for step in plan.quantized if plan.format_of(step).needs_input_scale]
    if not steps:
        static_activations(plan.recipe)
    forms = {step.row.module: static_activations(plan.recipe_of(step)) for step in steps}
    names = {step.row.module: step.row.canonical.removesuffix(".weight") for step in steps}
    found = measure_input_scales(
        balanced_draft(draft, plan),
        traces,
        num_draft_tokens=num_draft_tokens,
        others=[name for name in names.values() if name not in draft.linears],
        on_progress=on_progress,
    )
    scales = {module: stored_scale(found[names[module]].absmax, forms[module]) for module in names}
    return StaticScales(
        scales=scales,
        origin=f"traces sha256 {traces.sha256}, num_draft_tokens {num_draft_tokens}",
        prompts=seen_prompts(traces),
    )


def balanced_draft(draft: LoadedDraft, plan: Plan) -> LoadedDraft:
    """The draft as the plan will balance its concat input: other inputs, the same outputs.

    Raises:
        CheckpointError: a source file shrank.
    """
    balanced = balanced_norms(plan)
    if plan.balanced is None or not balanced:
        return draft
    norm, linears = plan.balanced
    factor = 2.0 ** balanced[norm.row.tensor.name]
    weights = dict(draft.weights)
    weights[norm.row.canonical] = weights[norm.row.canonical] / factor
    for step in linears:
        weight = weights[step.row.canonical].clone()
        weight[:, : weight.shape[1] // 2] *= factor
        weights[step.row.canonical] = weight
    return dataclasses.replace(draft, weights=weights)
