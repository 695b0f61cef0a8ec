"""`estimate`: bytes, time and break-even acceptance of a draft, from headers alone."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ...quantize.drafts import Draft
from ...quantize.engines.preview import planned_verdicts
from ...quantize.errors import LayoutError, PlanError
from ...quantize.estimate.draft_round import (
    USUAL_CONTEXT,
    checked_num_draft_tokens,
    usual_context,
)
from ...quantize.estimate.estimate_report import EstimateReport, candidates_of
from ...quantize.estimate.work import Machine
from ...quantize.gpus import USUAL_GPUS, Gpu, named_gpu
from ...quantize.quantization_plan import Plan, make_plan
from ...recipes import built_in_recipes
from ...recipes.bounds import ABOVE_0, AT_LEAST_1, SHARE_OR_ALL
from . import arguments, reports
from .opening import named_recipe, open_draft
from .option import Option
from .references import AnyRecipe
from .settings import Settings
from .verb import verb


@dataclass(frozen=True, slots=True)
class EstimateSettings(Settings):
    """Of which draft, by which recipes, on which GPUs, beside which target."""

    draft: arguments.Draft
    _: KW_ONLY
    recipes: Annotated[
        Sequence[AnyRecipe],
        Option(
            "recipe to compare: a built-in name or a .yaml file; repeat for more "
            "(default: all that fit the draft)",
            "RECIPE",
            flag="--recipe",
            several="repeated",
        ),
    ] = ()
    gpus: Annotated[
        Sequence[str],
        Option(
            f"h100, mi325x, ..., may be repeated; default: {', '.join(USUAL_GPUS)}",
            "GPU",
            flag="--gpu",
            several="repeated",
        ),
    ] = ()
    num_draft_tokens: arguments.NumDraftTokens = None
    context: Annotated[
        int | None,
        Option(
            f"positions per sequence (default: {USUAL_CONTEXT}, or fewer where DRAFT's config.json"
            " allows no more)",
            "TOKENS",
            bounds=AT_LEAST_1,
        ),
    ] = None
    concurrency: Annotated[
        int, Option("concurrent sequences (default 1)", "SEQUENCES", bounds=AT_LEAST_1)
    ] = 1
    tp: Annotated[int, Option("tensor-parallel size (default 1)", "GPUS")] = 1
    efficiency: Annotated[
        float,
        Option(
            "share of the data sheet's bandwidth and peak that kernels reach (default 0.75)",
            "SHARE",
            bounds=SHARE_OR_ALL,
        ),
    ] = 0.75
    target_step_ms: Annotated[
        float | None,
        Option(
            "measured time of the target's verify step in ms, at this concurrency",
            "MILLISECONDS",
            bounds=ABOVE_0,
        ),
    ] = None
    target_layers: arguments.TargetLayers = None


@verb(EstimateSettings)
def estimate(settings: EstimateSettings) -> "reports.EstimateReport":
    """Estimate how long one draft step takes, and how much acceptance quantization may cost.

    Returns:
        Bytes and milliseconds of the unquantized draft and of each recipe's draft, on each GPU.

    Raises:
        DraftQuantError: the draft, a recipe or a GPU cannot be estimated.
    """
    names = dict.fromkeys(named_gpu(name).name for name in settings.gpus or USUAL_GPUS)
    gpus = [named_gpu(name) for name in names]
    _, draft = open_draft(settings.draft, listener=settings.listener)
    num_draft_tokens = checked_num_draft_tokens(draft.geometry, settings.num_draft_tokens)
    plans, refused = _plans(draft, settings)
    context = settings.context or usual_context(draft.checkpoint.config)
    step_ms = settings.target_step_ms
    return EstimateReport(
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        context=context,
        tp=settings.tp,
        concurrency=settings.concurrency,
        candidates=candidates_of(
            draft, plans, num_draft_tokens=num_draft_tokens, context=context, tp=settings.tp
        ),
        loaded_by={plan.recipe.name: _loaded_by(plan, gpus, settings.tp) for plan in plans},
        refused=refused,
        machines=tuple(Machine(gpu=gpu, efficiency=settings.efficiency) for gpu in gpus),
        verify_seconds=None if step_ms is None else step_ms / 1e3,
    )


def _plans(draft: Draft, settings: EstimateSettings) -> tuple[list[Plan], Mapping[str, str]]:
    """Plans of the recipes asked for; of all that are shipped, those that there are, and why not.

    Raises:
        PlanError, LayoutError: a recipe that was asked for does not fit the draft.
    """
    plans, refused = [], {}
    named = [named_recipe(one, settings.listener) for one in settings.recipes or built_in_recipes()]
    for recipe in (one for place, one in enumerate(named) if one not in named[:place]):
        try:
            plans.append(make_plan(recipe, draft, target_layers=settings.target_layers))
        except (PlanError, LayoutError) as exc:
            if settings.recipes:
                raise
            refused[recipe.name] = exc.what
    return plans, refused


def _loaded_by(plan: Plan, gpus: Sequence[Gpu], tp: int) -> dict[str, list[str]]:
    """GPU -> the engines that load the result of a plan there, by `check`."""
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        layers = plan.target_layers
        verdicts = planned_verdicts(plan, arch=gpu.arch, tp=tp, target_layers=layers)
        found[gpu.name] = [one.engine for one in verdicts if one.verdict == "LOADS"]
    return found
