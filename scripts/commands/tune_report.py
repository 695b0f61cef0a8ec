"""What `draftquant tune` prints: costs, the path, the choice."""

from typing import TYPE_CHECKING

from ...quantize.gpus import gpu_names
from ...recipes.formats import NUMBER_FORMATS
from ..console import print_table, stdout, table

if TYPE_CHECKING:
    from ...validate.tuning.measured_mixtures import Point
    from ..api.reports import TuneReport
    from ..api.tune import TuneSettings


def print_report(report: "TuneReport") -> None:
    """Costs unit by unit, and the mixtures of the path."""
    options = list(dict.fromkeys(o for each in report.costs.values() for o in each))
    names = [str(option) for option in options if option.format is not None]
    costs = table(
        "Each linear quantized alone: MB, and share of proposals that differ",
        "linears",
        *names,
        right=(*names,),
    )
    for unit, each in report.costs.items():
        cells = (
            f"{each[o].nbytes / 1e6:.2f} {each[o].divergence:.2%}" if o in each else "-"
            for o in options
            if o.format is not None
        )
        costs.row(str(unit), *cells)
    print_table(costs)
    numbers = ("MB", "overlap", "length", "change (bounds)")
    path = table("Mixtures", "", "formats", *numbers, right=numbers)
    for point in report.points:
        mark = "chosen" if point is report.chosen else "" if point.best else "beaten"
        path.row(
            mark,
            _formats(point),
            f"{point.nbytes / 1e6:.2f}",
            f"{point.overlap:.2%}",
            f"{point.acceptance_length:.4f}",
            point.said_change,
        )
    print_table(path)
    for one in report.refused:
        stdout().line(f"not possible: {one.what}: {one.why}")


def print_choice(settings: "TuneSettings", report: "TuneReport") -> None:
    """What was chosen, and what comes next."""
    recipe = report.recipe
    judged = f"judged on {report.num_prompts} prompts"
    if report.num_calibration_prompts:
        judged += f", calibrated on {report.num_calibration_prompts} others"
    stdout().line(f"unquantized: {report.unquantized_length:.4f}; {judged}")
    if report.algorithm != "gptq" and any(_four_bits(point) for point in report.points):
        stdout().line(
            f"the algorithm was {report.algorithm}; --algorithm gptq was not tried. It calibrates"
            " on half of the prompts, judges by the others, and often lets narrower formats pass"
        )
    for warning in report.warnings:
        stdout().line(("warning: ", "bold"), warning)
    if recipe is None:
        limit = "small enough" if report.wanted.budget is not None else "shown to be close enough"
        stdout().line(
            f"no mixture is {limit}: no recipe is written; the closest is"
            f" {_formats(_closest(report))}"
        )
        return
    stdout().line((str(settings.out), "bold"), f": {recipe.summary}")
    if smaller := _perhaps(report):
        stdout().line(
            f"{_formats(smaller)} is smaller and was measured within the limit, but so few prompts"
            " cannot prove it: record more"
        )
    places = ", ".join(f"{place.engine} on {gpu_names(place.arch)}" for place in recipe.loads_on)
    stdout().line(f"loads on {places}; now: draftquant quantize {settings.draft} --recipe"
                  f" {settings.out} ..., and gate it on other prompts")  # fmt: skip


def _perhaps(report: "TuneReport") -> "Point | None":
    """The smallest that is good enough by its estimate, but not by its bounds."""
    max_drop = report.wanted.max_drop
    if max_drop is None or report.chosen is None:
        return None
    within = [point for point in report.points if point.change.relative_change >= -max_drop]
    smallest = min(within, key=lambda point: point.nbytes, default=report.chosen)
    return smallest if smallest.nbytes < report.chosen.nbytes else None


def _closest(report: "TuneReport") -> "Point":
    if report.wanted.budget is not None:
        return min(report.points, key=lambda point: point.nbytes)
    return min(report.points, key=lambda point: point.largest_drop)


def _four_bits(point: "Point") -> bool:
    """Whether GPTQ would have found other values for it."""
    forms = (option.format for option in point.mixture.values())
    return any(form and NUMBER_FORMATS[form.weights.dtype].bits < 8 for form in forms)


def _formats(point: "Point") -> str:
    from ...validate.tuning.draft_mixture import described

    return described(point.mixture)
