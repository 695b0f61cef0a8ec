"""`draftquant tune`: which formats the linears of a draft may have, and the recipe that says so."""

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.drafts import Draft
from ...quantize.engines.contract import EngineName
from ...quantize.errors import LayoutError
from ...quantize.files.hub import DraftSource
from ...quantize.files.staging import check_output, write_text
from ...quantize.gpus import architecture
from ...quantize.layouts import check_layout
from ...quantize.plan import make_plan
from ...recipes import Recipe, built_in_recipes
from ...recipes.errors import RecipeError
from ...recipes.schema import ALGORITHMS, LayoutName
from ..console import note, print_json
from .common import (
    add_allow_zero_rows,
    add_device,
    add_num_draft_tokens,
    add_target,
    add_target_layers,
    draft_on_traces,
    named_recipe,
    open_draft,
    share,
    with_algorithm,
)
from .tune_report import MAX_DROP, print_choice, print_report, recipe_document

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.tuning.candidates import Candidates
    from ...validate.tuning.tune_draft import Wanted

CALIBRATION_SHARE = 0.5
"""Of the prompts, where scales or codes are found by them: the others judge."""
TUNABLE = tuple(name for name in ALGORITHMS if name != "learned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`tune DRAFT --traces T --engine E --arch GPU --out R.yaml [--budget B | --max-drop X]`."""
    parser.add_argument("draft", metavar="DRAFT", help="BF16 draft, folder or Hub id")
    parser.add_argument(
        "--traces",
        required=True,
        type=Path,
        metavar="TRACES",
        help="traces to find and judge mixtures by; not the ones that the gate judges on",
    )
    parser.add_argument(
        "--engine",
        required=True,
        choices=typing.get_args(EngineName),
        help="that must load the result",
    )
    parser.add_argument("--arch", required=True, metavar="GPU", help="on which: b200, sm100, ...")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE.yaml", help="recipe file to create"
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        metavar="RECIPE",
        help="recipes whose formats may be mixed, the first one gives the rules (default: all"
        " built-in ones whose format the layout holds)",
    )
    parser.add_argument(
        "--layout",
        choices=typing.get_args(LayoutName),
        default="compressed-tensors",
        help="in which all formats are stored (default: %(default)s)",
    )
    parser.add_argument(
        "--algorithm",
        choices=TUNABLE,
        help="how quantized values and scales are found (default: gptq where a --recipe names it,"
        " else absmax)",
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--budget", type=float, metavar="BYTES", help="of all tensors of the draft: at most these"
    )
    limit.add_argument(
        "--max-drop",
        type=share,
        metavar="SHARE",
        help="largest relative loss of acceptance length, ruled out at 95 %%"
        f" (default: {MAX_DROP:g})",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the path: FILE.svg, .png or .pdf"
    )
    add_num_draft_tokens(parser)
    add_device(parser)
    add_target(parser)
    add_target_layers(parser)
    add_allow_zero_rows(parser)
    parser.add_argument(
        "--fix-config",
        action="store_true",
        help="as 'quantize --fix-config' will change config.json",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`; 1 if no mixture is as wanted."""
    from ...calibration.plot_file import check_plot_path
    from ...calibration.traces.recorded_prompts import seen_prompts
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.tuning.draft_mixture import options_of, units_of
    from ...validate.tuning.path_plot import draw_path
    from ...validate.tuning.tune_draft import tune_draft

    check_output(options.out)
    if options.out.suffix not in (".yaml", ".yml"):
        raise RecipeError(options.out, "is no name of a recipe", fix="for example tuned.yaml")
    if options.plot:
        check_output(options.plot)
        check_plot_path(options.plot)
    wanted = _wanted(options)
    options.algorithm = options.algorithm or _algorithm(options.recipe or ())
    source, draft = open_draft(options.draft)
    recipes = _recipes(options)
    candidates, judging = _candidates(options, source, draft, recipes)
    units = units_of(make_plan(recipes[0], draft, target_layers=options.target_layers))
    mixed = options_of(recipes)
    report = tune_draft(
        candidates,
        units,
        mixed,
        judging,
        wanted,
        on_progress=lambda what: note(f"tune: {what}"),
    )
    chosen = report.chosen
    recipe = None
    if chosen is not None:
        seen = seen_prompts(TraceFolder.open(options.traces))
        recipe = candidates.recipe(chosen.mixture, options.out.stem, chosen_on=seen)
        write_text(options.out, recipe_document(recipe, draft, report))
    if options.plot:
        draw_path(report, options.plot, f"{candidates.reference.name}: {candidates.serving}")
    if options.json:
        out = str(options.out) if recipe else None
        print_json(report.to_mapping() | {"algorithm": options.algorithm, "out": out})
    else:
        print_report(report)
        print_choice(options, report, recipe)
    return 0 if recipe else 1


def _wanted(options: argparse.Namespace) -> "Wanted":
    from ...validate.errors import TuneError
    from ...validate.tuning.tune_draft import Wanted

    if options.budget is not None:
        if not 1 <= options.budget < float("inf"):
            raise TuneError("--budget", f"expected bytes, got {options.budget:g}", fix="e.g. 2.5e9")
        return Wanted(budget=int(options.budget))
    max_drop = MAX_DROP if options.max_drop is None else options.max_drop
    if not 0 < max_drop < 1:
        raise TuneError(
            "--max-drop",
            f"expected a share above 0 and below 1, got {max_drop:g}",
            fix="for example 0.01, which is 1 %",
        )
    return Wanted(max_drop=max_drop)


def _algorithm(names: Sequence[str]) -> str:
    """What the recipes that were named ask for: GPTQ if one of them does."""
    gptq = any(named_recipe(name).algorithm.rounding == "gptq" for name in names)
    return "gptq" if gptq else "absmax"


def _recipes(options: argparse.Namespace) -> list[Recipe]:
    """Those whose formats may be mixed, in one layout, by one algorithm and our own backend."""
    names = options.recipe or built_in_recipes()
    found, last = [], None
    for name in names:
        recipe = with_algorithm(named_recipe(name), options.algorithm)
        if not options.recipe and recipe.weights.scale_dtype:
            continue  # AWQ's own scales: another recipe has the same codes
        recipe = dataclasses.replace(recipe, layout=options.layout)
        try:
            check_layout(recipe)
        except LayoutError as exc:
            if options.recipe:
                raise
            last = exc  # of all built-in formats those that the layout holds
            continue
        found.append(recipe)
    if last is not None and not found:
        raise last
    return found


def _candidates(
    options: argparse.Namespace, source: DraftSource, draft: Draft, recipes: Sequence[Recipe]
) -> "tuple[Candidates, TraceFolder]":
    """What makes the drafts, and the traces that judge them."""
    from ...calibration.rounding.sequences import split_prompts
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.tuning.candidates import Candidates, Serving

    traces = TraceFolder.open(options.traces)
    folder = draft.checkpoint.folder
    reference, shared, num_draft_tokens = draft_on_traces(folder, traces, options)
    calibration, judging = None, traces
    if options.algorithm == "gptq" or any(recipe.needs_input_scales for recipe in recipes):
        split = split_prompts(traces, num_draft_tokens, share=1 - CALIBRATION_SHARE, seed=0)
        calibration, judging = traces.only(split.learned), traces.only(split.held_back)
    candidates = Candidates(
        draft=draft,
        source=source,
        reference=reference,
        base=recipes[0],
        serving=Serving(
            engine=options.engine,
            arch=architecture(options.arch),
            target_layers=options.target_layers,
        ),
        calibration=calibration,
        num_draft_tokens=num_draft_tokens,
        shared=shared,
        allow_zero_rows=options.allow_zero_rows,
        fix_config=options.fix_config,
    )
    return candidates, judging


def _say(what: str) -> None:
    note(f"tune: {what}")
