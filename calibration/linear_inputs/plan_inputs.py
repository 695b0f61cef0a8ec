"""What a plan must know of the inputs of its linears: their static scales and second moments.

Codes that are learned are found above; what is given to `quantize_draft` holds them too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...quantize.algorithms import FoundCodes, Need, Statistics
from ...quantize.backends import get_backend
from ...quantize.drafts.forward import whole_rows
from ...quantize.drafts.kinds.block import BlockForward
from ...quantize.drafts.kv_cache import CacheScales
from ...quantize.drafts.shared.mixture.names import is_expert
from ...quantize.measured import Measured
from ...quantize.quantization_plan import Plan
from ...quantize.stored.activations import InputRounding, kernel_scale
from ...quantize.stored.declared_formats import declared_activations
from ...quantize.stored.loading import LoadedDraft
from ...recipes.seen_prompts import NO_PROMPTS, SeenPrompts
from ..traces.recorded_prompts import seen_prompts
from ..traces.trace_folder import TraceFolder
from .second_moments import BLOCK_ROW_STRIDE, MomentsAlongTraces
from .static_scales import StaticScales, balanced_draft, calibrated_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What `quantize_draft` is given.

    Attributes:
        static: scales to store, where the recipe's activations need them.
        statistics: where the algorithm needs them.
        found: codes, where the algorithm needs them.
        prompts: that were looked at.
        cache_scales: of the KV cache by layer, where the recipe measures them.
    """

    static: StaticScales | None = None
    statistics: Statistics | None = None
    found: FoundCodes | None = None
    prompts: SeenPrompts = NO_PROMPTS
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)

    @property
    def measured(self) -> Measured:
        """The same as `quantize_draft` takes it."""
        scales, origin = (self.static.scales, self.static.origin) if self.static else ({}, None)
        return Measured(
            input_scales=scales,
            input_scale_origin=origin,
            cache_scales=self.cache_scales,
            statistics=self.statistics,
            found=self.found,
            prompts=self.prompts,
        )


def need_of(plan: Plan) -> Need:
    """What the plan's algorithm must know of inputs."""
    return get_backend(plan.recipe.backend, plan.recipe.algorithm).needs


def why_unused(plan: Plan, *, scale_is_given: bool = False) -> str | None:
    """Why traces would tell a plan nothing; None where it must know something of what is computed.

    Args:
        scale_is_given: static scales are, so they are not measured.
    """
    recipe, algorithm = plan.recipe, plan.recipe.algorithm
    if recipe.kv_cache is not None and recipe.kv_cache.needs_traces:
        return None
    if need_of(plan) != "none" or (recipe.needs_input_scales and not scale_is_given):
        return None
    if recipe.needs_input_scales:
        return f"--input-scale gives the static scales, and {algorithm} looks at no inputs"
    return f"recipe {recipe.name} stores no static input scales, and {algorithm} looks at no inputs"


def measured_inputs(
    plan: Plan,
    draft: LoadedDraft,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    spool: Path,
    static: StaticScales | None = None,
    precise: bool = False,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_stage_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> PlanInputs:
    """Static scales now, and moments stage by stage when `quantize_draft` asks for them.

    Where the plan needs neither, the traces are not looked at (`why_unused`).

    Args:
        draft: to quantize, in BF16 or wider values.
        num_draft_tokens: K, as it will be served.
        spool: existing folder for second moments; see `MomentsAlongTraces`.
        static: scales that are given and not measured.
        precise: see `InputMoments`.
        on_progress: called with (work done, work) while scales are measured.
        on_stage_progress: called so while the moments of a stage are.

    Raises:
        TraceError, CalibrationError: the traces do not fit.
    """
    if why_unused(plan, scale_is_given=static is not None):
        return PlanInputs(static=static)
    if plan.recipe.needs_input_scales and static is None:
        static = calibrated_scales(
            plan, draft, traces, num_draft_tokens=num_draft_tokens, on_progress=on_progress
        )
    statistics = None
    if need_of(plan) == "second_moments":
        rounding = served_rounding(plan, static, draft.device)
        statistics = MomentsAlongTraces(
            balanced_draft(draft, plan),
            traces,
            num_draft_tokens=num_draft_tokens,
            spool=spool,
            rounding=rounding,
            corrected=corrected_linears(plan),
            together=rounding.rounds_alone,
            precise=precise,
            on_progress=on_stage_progress,
        )
    return PlanInputs(static=static, statistics=statistics, prompts=seen_prompts(traces))


def corrected_linears(plan: Plan) -> frozenset[str]:
    """Linears whose weights are to make up for the rounding of their inputs, by canonical names."""
    return frozenset(
        step.row.canonical.removesuffix(".weight")
        for step in plan.quantized
        if plan.recipe_of(step).algorithm.input_correction == "auto"
        and plan.format_of(step).has_coarse_inputs
    )


WANTED_PER_COLUMN = 32
"""Inputs for each column of a weight: with four times as many, what correction wins hardly grows.
Measured by the divergence on other prompts, NVFP4 on EAGLE-3 Llama: see docs/rounding.md."""


def few_for_correction(
    plan: Plan, draft: LoadedDraft, traces: TraceFolder, num_draft_tokens: int
) -> str | None:
    """Said before anything runs, where correction wants more prompts than there are; else None.

    Of experts nothing: who is routed to them shows when the draft runs.
    """
    columns = {
        name: draft.weights[f"{name}.weight"].shape[1]
        for name in sorted(corrected_linears(plan))
        if not is_expert(name)
    }
    rows = sum(
        len(whole_rows(one.num_tokens, num_draft_tokens, first_row=one.prompt_length - 1))
        for one in traces.manifest.prompts
    )
    is_block = isinstance(draft.forward, BlockForward)
    inputs = rows * num_draft_tokens // (BLOCK_ROW_STRIDE if is_block else 1)
    name = max(columns, key=columns.__getitem__, default=None)
    if name is None or inputs >= WANTED_PER_COLUMN * columns[name]:
        return None
    prompts = len(traces.manifest.prompts)
    wanted = math.ceil(prompts * WANTED_PER_COLUMN * columns[name] / max(1, inputs))
    return (
        f"input correction: {prompts} prompts give at least {inputs:,} inputs for the"
        f" {columns[name]:,} columns of {name}; from {WANTED_PER_COLUMN} for each column on, more"
        f" hardly help: about {wanted:,} prompts like these. With fewer, weights are corrected less"
    )


def served_rounding(plan: Plan, static: StaticScales | None, device: torch.device) -> InputRounding:
    """Inputs of the quantized linears as kernels will round them."""
    activations, scales = {}, {}
    for step in plan.quantized:
        name = step.row.canonical.removesuffix(".weight")
        how = activations[name] = declared_activations(plan.format_of(step).activations)
        if static is not None and plan.format_of(step).needs_input_scale:
            scale = torch.tensor(static.scales[step.row.module], device=device)
            scales[name] = kernel_scale(how, scale)
    return InputRounding(activations, scales, None)
