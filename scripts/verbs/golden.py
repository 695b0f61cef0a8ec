"""`golden`: what a draft accepts, as figures, as a profile and as load tests take it."""

from typing import TYPE_CHECKING, Any

from ...validate.runs.serving_asked import GoldenRun
from ..frame import reports
from ..frame.console import print_document, print_table, stderr, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.golden.profile import Profile


@verb(GoldenRun)
def golden(settings: GoldenRun) -> "reports.GoldenText":
    """Turn golden acceptance into a speculation profile, or either into settings of load tests.

    Returns:
        The figures that follow from the file, and what was made of them as text.

    Raises:
        GoldenError: figures contradict each other, nobody measured the draft, or the file lacks the
            category or what the form needs.
        OutputError: the file to write exists already, or cannot be written.
    """
    from ...validate.runs.golden_run import golden_made

    return golden_made(settings)


def _mapping(rendered: "reports.GoldenText", _settings: object) -> dict[str, Any]:
    from ...recipes.decode import encode

    profile = encode(rendered.profile)
    return {"profile": profile, "text": rendered.text, "notes": rendered.notes, "out": rendered.out}


def _show(rendered: "reports.GoldenText", settings: GoldenRun) -> None:
    if not rendered.text:
        _print(rendered.profile, str(settings.golden))
    elif rendered.out is None:
        print_document(rendered.text)
    for note in rendered.notes:
        stderr().line(note)
    if rendered.out is not None:
        stderr().line((str(rendered.out), "bold"), f": written for {settings.to}")


def _print(profile: "Profile", file: str) -> None:
    told = (file, profile.method, f"K = {profile.num_draft_tokens}")
    positions = [f"pos {i + 1}" for i in range(len(profile.rates))]
    numbers = ("acceptance length", "95% interval", "prompts", *positions)
    title = ", ".join(filter(None, told))
    grid = table(title, "prompts of", *numbers, spare=("prompts",))
    for name, part in {"all": profile, **(profile.per_category or {})}.items():
        rates = [f"{rate:.3f}" for rate in part.rates] or [""] * len(positions)
        grid.row(
            name,
            f"{part.mean:.4f}",
            " to ".join(f"{bound:.4f}" for bound in part.interval_95 or ()),
            "" if part.num_samples is None else f"{part.num_samples:,}",
            *rates,
        )
    print_table(grid)


COMMAND = Command(golden, _show, _mapping)
