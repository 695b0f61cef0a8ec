"""An estimate as a caller asks for it: for which draft, by which recipes, on which GPUs."""

from collections.abc import Mapping, Sequence

from ..recipes import built_in_recipes
from ..recipes.chosen_recipe import named_recipe
from ..recipes.errors import LayoutError, PlanError
from .asked import Estimating
from .drafts import Draft
from .engines.plan_verdicts import planned_verdicts
from .estimate.draft_step import checked_num_draft_tokens, usual_context
from .estimate.estimate_report import EstimateReport, candidates_of
from .estimate.work import Machine, VerifyStep
from .gpus import USUAL_GPUS, Gpu, named_gpu
from .inspection import open_draft
from .planning.quantization_plan import Plan, make_plan


def estimate_draft(asked: Estimating) -> EstimateReport:
    """Bytes and milliseconds of a draft and of each recipe's result, on each GPU."""
    names = dict.fromkeys(named_gpu(name).name for name in asked.gpus or USUAL_GPUS)
    gpus = [named_gpu(name) for name in names]
    _, draft = open_draft(asked.draft, listener=asked.listener)
    num_draft_tokens = checked_num_draft_tokens(draft.geometry, asked.num_draft_tokens)
    plans, refused = plans_that_fit(draft, asked)
    context = asked.context or usual_context(draft.checkpoint.config)
    served = VerifyStep(num_draft_tokens, context, asked.tp, asked.concurrency)
    step_ms = asked.target_step_ms
    return EstimateReport(
        draft=draft,
        **served._asdict(),
        candidates=candidates_of(draft, plans, served),
        loaded_by={plan.recipe.name: _loaded_by(plan, gpus, asked.tp) for plan in plans},
        refused=refused,
        machines=tuple(Machine(gpu=gpu, efficiency=asked.efficiency) for gpu in gpus),
        verify_seconds=None if step_ms is None else step_ms / 1e3,
    )


def plans_that_fit(draft: Draft, asked: Estimating) -> tuple[list[Plan], Mapping[str, str]]:
    """Plans of the requested recipes, or of all built-in ones that fit, and why others do not."""
    plans, refused = [], {}
    named = [named_recipe(name, asked.listener) for name in asked.recipes or built_in_recipes()]
    for recipe in (each for place, each in enumerate(named) if each not in named[:place]):
        try:
            plans.append(make_plan(recipe, draft, target_layers=asked.target_layers))
        except (PlanError, LayoutError) as exc:
            if asked.recipes:
                raise
            refused[recipe.name] = exc.what
    return plans, refused


def _loaded_by(plan: Plan, gpus: Sequence[Gpu], tp: int) -> dict[str, list[str]]:
    """GPU -> the engines that load the result of a plan there, according to `check`."""
    engines: dict[str, list[str]] = {}
    for gpu in gpus:
        verdicts = planned_verdicts(plan, arch=gpu.arch, tp=tp)
        engines[gpu.name] = [check.engine for check in verdicts if check.verdict == "LOADS"]
    return engines
