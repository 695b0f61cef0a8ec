"""How reports write numbers, and words for their keys: the same in every form."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..counting.paired_change import PairedChange
from ..judging.categories import Parts
from ..judging.figures import ServedFigures
from ..judging.judgement import GateReport
from ..judging.policy import in_percent

NONE = "\u2013"
"""A dash, for a missing figure."""
_COMMAND = ": draftquant "


class SideNames(NamedTuple):
    """What is compared: the name of each side, and of both in a sentence."""

    first: str
    second: str
    both: str

    @property
    def heads(self) -> tuple[str, str]:
        """The names at the head of a column."""
        return self.first[0].upper() + self.first[1:], self.second[0].upper() + self.second[1:]


DRAFTS = SideNames("BF16", "quantized", "under both drafts")
TARGETS = SideNames("beside the first", "beside the second", "beside both targets")
SERVERS = SideNames("on the first", "on the second", "on both servers")
"""Those of one draft that is judged beside two targets, or on two servers."""


def change(paired: PairedChange | None, max_drop: float | None = None) -> str:
    """A change in percent, told from the limit of a drop; `NONE` where there is none."""
    return NONE if paired is None else paired.in_percent(max_drop)[0]


def bounds(paired: PairedChange | None, max_drop: float | None = None) -> str:
    """Both bounds in the same way."""
    return NONE if paired is None else " to ".join(paired.in_percent(max_drop)[1:])


def limit(max_relative_drop: float) -> str:
    """The change that must not be undercut."""
    return f"{-max_relative_drop:+.2%}"


def _written(number: float | None, form: str) -> str:
    return NONE if number is None else format(number, form)


length, share, figure = (partial(_written, form=form) for form in (".3f", ".1%", ".4g"))
"""A mean acceptance length, a share in percent, a figure of any kind."""


def count(number: float) -> str:
    """A whole number if it was counted, with one more digit if it is expected."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"


def nbytes(number: float) -> str:
    """Bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"


def server(served: ServedFigures) -> str:
    """Which server was measured, and by which tool if it was not ours."""
    engine = " ".join(filter(None, (served.engine, served.version)))
    return engine if served.tool is None else f"{engine} (measured by {served.tool})"


def digest(sha256: str | None) -> str:
    """The start of a hash, as people compare them."""
    return "not known" if sha256 is None else sha256[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A line in the table of a comparison: the whole, whose name is "", or a part."""

    name: str
    prompts: str
    before: float
    after: float
    change: PairedChange | None
    bounds: PairedChange | None
    limit: float
    outcome: str | None

    @property
    def cells(self) -> tuple[str, ...]:
        """Prompts, both lengths, change, bounds and limit."""
        lengths = length(self.before), length(self.after)
        changes = change(self.change, self.limit), bounds(self.bounds, self.limit)
        return self.prompts, *lengths, *changes, limit(self.limit)


def rows(report: GateReport) -> Iterator[ComparisonRow]:
    """The whole of a comparison, then its parts."""
    yield ComparisonRow(
        name="",
        prompts=report.sample,
        before=report.baseline.mean_acceptance_length,
        after=report.candidate.mean_acceptance_length,
        change=report.change,
        bounds=report.change,
        limit=report.policy.max_relative_drop,
        outcome=report.verdict,
    )
    for part in report.parts.all:
        yield ComparisonRow(
            name=part.category,
            prompts=count(part.num_prompts),
            before=part.baseline_mean_acceptance_length,
            after=part.candidate_mean_acceptance_length,
            change=part.change,
            bounds=part.change if part.bounds_are_shown else None,
            limit=part.max_relative_drop,
            outcome=part.outcome,
        )


def together(parts: Parts) -> str | None:
    """The confidence at which bounds hold together, in one sentence; None if none do."""
    of_each = {part.change.confidence for part in parts.all if part.change is not None}
    if not parts.bounds_hold_together or not of_each:
        return None
    return (
        f"Bounds of categories and context bins are one-sided, at {in_percent(max(of_each))} each,"
        " so that those of all judged ones hold together."
    )


def command(argv: Sequence[str]) -> str:
    """A command line as a shell takes it; a placeholder where Python called."""
    return shlex.join(argv) if argv else "called from Python"


def way_out(way: str) -> tuple[str, str]:
    """A sentence that says what to do, and the command for it; "" where there is none."""
    sentence, separator, arguments = way.partition(_COMMAND)
    return (f"{sentence}:", f"{_COMMAND[2:]}{arguments}") if separator else (way, "")


def estimator(name: str) -> str:
    """How two measurements were compared."""
    return name.replace("rounds", "verify steps")
