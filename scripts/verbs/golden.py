"""`golden`: golden acceptance as load tests and Prometheus take it."""

from typing import TYPE_CHECKING, Any

from ...validate.runs.serving_asked import GoldenRun
from ..frame import reports
from ..frame.console import print_document, print_table, stderr, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.golden.golden_acceptance import Golden


@verb(GoldenRun, exclusive=("category", "category_label"))
def golden(settings: GoldenRun) -> "reports.GoldenText":
    """Turn golden acceptance into settings of load tests, or alerts.

    Returns:
        The golden acceptance that was read, and what was made of it as text.

    Raises:
        GoldenError: the file is no golden acceptance, its figures do not follow from its counts, or
            it lacks the category; or no limit follows from it, or none that a draft can fall below.
        OutputError: the file to write exists already, or cannot be written.
    """
    from ...validate.runs.golden_run import golden_made

    return golden_made(settings)


def _mapping(rendered: "reports.GoldenText", _settings: object) -> dict[str, Any]:
    from ...recipes.decode import encode

    golden = encode(rendered.golden)
    return {"golden": golden, "text": rendered.text, "notes": rendered.notes, "out": rendered.out}


def _show(rendered: "reports.GoldenText", settings: GoldenRun) -> None:
    if not rendered.text:
        _print(rendered.golden)
    elif rendered.out is None:
        print_document(rendered.text)
    for note in rendered.notes:
        stderr().line(note)
    if rendered.out is not None:
        stderr().line((str(rendered.out), "bold"), f": written for {settings.to}")


def _print(golden: "Golden") -> None:
    positions = [f"pos {i + 1}" for i in range(golden.num_draft_tokens)]
    numbers = ("acceptance length", "standard error", "prompts", "verify steps", *positions)
    where = "replayed" if golden.source == "replay" else f"{golden.source} {golden.source_version}"
    grid = table(
        f"{golden.draft}, K = {golden.num_draft_tokens}, {where}", "prompts of", *numbers,
        right=numbers, spare=("verify steps", "prompts"),
    )  # fmt: skip
    rows = [(name or "all", figures) for name, figures in golden.categories.items()]
    rows += [(f"context {name}", figures) for name, figures in golden.context_bins.items()]
    for name, figures in rows:
        error = figures.standard_error
        grid.row(
            name,
            f"{figures.mean_acceptance_length:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{figures.prompts:,}",
            f"{figures.verify_steps:,.0f}",
            *(f"{rate:.3f}" for rate in figures.acceptance_rates),
        )
    print_table(grid)


COMMAND = Command(golden, _show, _mapping)
