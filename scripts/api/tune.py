"""`tune`: which formats the linears of a draft may have, and the recipe that says so."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ...quantize.engines.contract import EngineName
from ...quantize.files.staging import check_output, write_text
from ...quantize.gpus import architecture
from ...quantize.quantization_plan import make_plan
from ...recipes import Recipe, built_in_recipes
from ...recipes.errors import RecipeError
from ...recipes.schema import LayoutName
from . import reports
from .arguments import (
    AllowZeroRows,
    AnyPath,
    Device,
    NoCache,
    NumDraftTokens,
    Precise,
    Target,
    TargetLayers,
    share,
)
from .opened_traces import open_traces
from .opening import draft_on_traces, named_recipe, open_draft, with_algorithm
from .option import Argument, Option
from .references import AnyRecipe, Reference, optional_path
from .replay import replay_cache
from .settings import Settings
from .verb import verb

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.drafts import Draft
    from ...quantize.files.hub import DraftSource
    from ...validate.tuning.candidates import Candidates

MAX_DROP = 0.01
"""As the gate's release policy, where nothing is asked."""


@dataclass(frozen=True, slots=True)
class TuneSettings(Settings):
    """Of which draft, for which engine, judged by what, and which mixture is wanted."""

    draft: Annotated[Reference, Argument("BF16 draft: a folder or a Hub id (owner/name)", "DRAFT")]
    traces: Annotated[
        AnyPath,
        Option("traces to choose formats on; do not use the gate's traces", "TRACES"),
    ]
    out: Annotated[AnyPath, Option("recipe file to create", "FILE.yaml")]
    _: KW_ONLY
    engine: Annotated[EngineName, Option("engine that must load the result")]
    arch: Annotated[str, Option("GPU that it will run on: b200, mi325x, ...", "GPU")]
    recipes: Annotated[
        Sequence[AnyRecipe],
        Option(
            "recipes whose formats may be mixed; the first one gives the rules "
            "(default: all built-in recipes that the layout can store)",
            "RECIPE",
            flag="--recipe",
        ),
    ] = ()
    layout: Annotated[
        LayoutName, Option("layout that stores all formats (default: compressed-tensors)")
    ] = "compressed-tensors"
    algorithm: Annotated[
        Literal["absmax", "mse", "gptq"] | None,
        Option(
            "algorithm for quantized values and scales (default: gptq if a --recipe "
            "uses it, else absmax)"
        ),
    ] = None
    budget: Annotated[
        float | None, Option("largest total size of the draft's tensors, in bytes", "BYTES")
    ] = None
    max_drop: Annotated[
        float | None,
        Option(
            "largest relative loss of acceptance length, ruled out at 95 %%"
            f" (default: {MAX_DROP:g})",
            "SHARE",
            reads=share,
        ),
    ] = None
    plot: Annotated[
        AnyPath | None,
        Option("draw acceptance against size into this file (.svg, .png or .pdf)", "FILE"),
    ] = None
    num_draft_tokens: NumDraftTokens = None
    precise: Precise = False
    device: Device = "auto"
    target: Target = None
    target_layers: TargetLayers = None
    no_cache: NoCache = False
    allow_zero_rows: AllowZeroRows = False
    fix_config: Annotated[bool, Option("as 'quantize --fix-config', which repairs config.json")] = (
        False
    )

    exclusive = (("budget", "max_drop"),)

    def check(self) -> None:
        """Refuse limits that nothing can be held against."""
        from ...validate.errors import TuneError

        if self.budget is not None and not 1 <= self.budget < float("inf"):
            raise TuneError("--budget", f"expected bytes, got {self.budget:g}", fix="e.g. 2.5e9")
        if self.max_drop is not None and not 0 < self.max_drop < 1:
            raise TuneError(
                "--max-drop",
                f"expected a share above 0 and below 1, got {self.max_drop:g}",
                fix="for example 0.01, which is 1 %",
            )


@verb(TuneSettings)
def tune(settings: TuneSettings) -> "reports.TuneReport":
    """Find out which format each linear of a draft may have, and write the recipe.

    Returns:
        What every format costs, what was measured, and the recipe, which is None where no mixture
        meets the limit.

    Raises:
        DraftQuantError: there are too few prompts, no mixture loads, or the file exists already.
    """
    from ...calibration.plot_file import check_plot_path
    from ...calibration.traces.recorded_prompts import seen_prompts
    from ...validate.tuning.draft_mixture import options_of, units_of
    from ...validate.tuning.path_plot import draw_path
    from ...validate.tuning.tune_draft import Wanted, recipe_document, tune_draft

    out, plot, listener = Path(settings.out), optional_path(settings.plot), settings.listener
    check_output(out)
    if out.suffix not in (".yaml", ".yml"):
        raise RecipeError(out, "is no name of a recipe", fix="for example tuned.yaml")
    if plot:
        check_output(plot)
        check_plot_path(plot)
    if settings.budget is not None:
        wanted = Wanted(budget=int(settings.budget))
    else:
        wanted = Wanted(max_drop=MAX_DROP if settings.max_drop is None else settings.max_drop)
    source, draft = open_draft(settings.draft)
    recipes = _recipes(settings)
    traces = open_traces(settings.traces, settings.listener)
    candidates, judging = _candidates(settings, source, draft, recipes, traces)
    with listener.bar("tune", None):
        report = tune_draft(
            candidates,
            units_of(make_plan(recipes[0], draft, target_layers=settings.target_layers)),
            options_of(recipes),
            judging,
            wanted,
            cache=replay_cache(listener, no_cache=settings.no_cache),
            on_progress=lambda what: listener.note(f"tune: {what}"),
        )
    recipe = None
    if report.chosen is not None:
        seen = seen_prompts(traces)
        recipe = candidates.recipe(report.chosen.mixture, out.stem, chosen_on=seen)
        write_text(out, recipe_document(recipe, draft, report))
    if plot:
        draw_path(report, plot, f"{candidates.reference.name}: {candidates.serving}")
    return replace(report, recipe=recipe)


def _recipes(settings: TuneSettings) -> list[Recipe]:
    """Whose formats may be mixed: those that are named, or of all that are built in."""
    from ...validate.tuning.draft_mixture import mixable_recipes

    named = [named_recipe(one, settings.listener) for one in settings.recipes or built_in_recipes()]
    gptq = any(recipe.algorithm.rounding == "gptq" for recipe in named if settings.recipes)
    algorithm = settings.algorithm or ("gptq" if gptq else "absmax")
    by_one = [with_algorithm(recipe, algorithm) for recipe in named]
    return mixable_recipes(by_one, settings.layout, all_of_them=bool(settings.recipes))


def _candidates(
    settings: TuneSettings,
    source: "DraftSource",
    draft: "Draft",
    recipes: list[Recipe],
    traces: "TraceFolder",
) -> "tuple[Candidates, TraceFolder]":
    """What makes the drafts, and the traces that judge them."""
    from ...validate.tuning.candidates import Candidates, Serving, divided

    reference, shared, num_draft_tokens = draft_on_traces(
        draft.checkpoint.folder,
        traces,
        device=settings.device,
        target=optional_path(settings.target),
        num_draft_tokens=settings.num_draft_tokens,
    )
    calibration, judging = divided(traces, recipes, num_draft_tokens)
    candidates = Candidates(
        draft=draft,
        source=source,
        reference=reference,
        base=recipes[0],
        serving=Serving(
            engine=settings.engine,
            arch=architecture(settings.arch),
            target_layers=settings.target_layers,
        ),
        calibration=calibration,
        num_draft_tokens=num_draft_tokens,
        shared=shared,
        allow_zero_rows=settings.allow_zero_rows,
        precise=settings.precise,
        fix_config=settings.fix_config,
    )
    return candidates, judging
