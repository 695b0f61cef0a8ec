"""`plan`: what a recipe would do to every tensor, and where the result would load."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from typing_extensions import override

from ...quantize.engines.contract import EngineCheck, loading_places
from ...quantize.quantization_plan import Plan, make_plan
from ...recipes.brief import Brief, megabytes
from . import arguments
from .engine_verdicts import nothing_loads, to_mapping, verdicts_of
from .opening import chosen_recipe, open_draft
from .settings import Settings
from .verb import verb


@dataclass(frozen=True, slots=True)
class PlanSettings(Settings):
    """Of which draft, by which recipe."""

    draft: arguments.Draft
    recipe: arguments.RecipeName
    _: KW_ONLY
    subtree: arguments.Subtree = None
    backend: arguments.Backend = None
    algorithm: arguments.AlgorithmName = None
    input_correction: arguments.InputCorrectionChoice = None
    kv_cache: arguments.KvCacheScalesChoice = None
    target_layers: arguments.TargetLayers = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Brief):
    """What a recipe would do to a draft, found out from headers alone.

    Attributes:
        plan: every tensor with its rule, its action and its bytes.
        loads: what each known engine does with the result, on each of its GPUs.
        warnings: what the command line prints as warnings.
    """

    plan: Plan
    loads: tuple[EngineCheck, ...]
    warnings: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**self.plan.to_mapping(), "engines": to_mapping(self.loads)}

    @override
    def brief(self) -> Mapping[str, object]:
        plan = self.plan
        return {
            "recipe": plan.recipe.name,
            "draft": plan.draft.checkpoint.folder,
            "linears": f"{len(plan.quantized)} to quantize",
            "size": f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}",
            "loads in": loading_places(self.loads),
            "warnings": len(self.warnings) or None,
        }


@verb(PlanSettings)
def plan(settings: PlanSettings) -> PlanReport:
    """Show what a recipe would do to every tensor of a draft. Nothing is written.

    Returns:
        Each tensor with its rule, its action and its bytes, and which engines would load the
        result.

    Raises:
        DraftQuantError: the draft or the recipe cannot be read, or they do not fit each other.
    """
    _, draft = open_draft(settings.draft, settings.subtree, settings.listener)
    recipe = chosen_recipe(
        settings.recipe,
        backend=settings.backend,
        algorithm=settings.algorithm,
        input_correction=settings.input_correction,
        kv_cache=settings.kv_cache,
        listener=settings.listener,
    )
    made = make_plan(recipe, draft, target_layers=settings.target_layers)
    loads = verdicts_of(made)
    problem = nothing_loads(made, loads)
    if problem:
        settings.listener.warning(problem)
    return PlanReport(plan=made, loads=loads)
