"""Which draft for which traffic: every pair of drafts, in every category and overall."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import PackageLoader
from markupsafe import Markup
from typing_extensions import override

from ...quantize.files.report_files import ReportFormat
from ...recipes.decode import CONFIDENCE
from ...recipes.errors import CompareError
from ..judging.policy import in_percent
from ..judging.published import AnyPath, Paged
from ..report import words
from ..report.document import document_text
from ..report.html_report import render
from ..report.plots import Interval, forest
from ..report.svg import standalone
from .scopes import MIN_PROMPTS, Change, Counted, CountedDrafts, Scope, samples_of, scopes_of

FORMAT, SCHEMA_VERSION = "draftquant comparison", 1
MOST_COLUMNS = 12
"""Most drafts side by side in a table; with more, each has a row."""
_MOST_VALUES = 2**25
"""Contributions of prompts to estimates that are held at a time, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class DraftName:
    """A draft by its name and the hash of its tensors; None = not known."""

    name: str
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ComparisonReport(Paged):
    """How several drafts compare on the same prompts.

    Attributes:
        counted_by: how acceptance was counted, in words.
        num_draft_tokens: tokens drafted per verify step (K).
        drafts: the compared drafts, the baseline first.
        traffic: category -> its share of the output tokens; empty where prompts count as they are.
        method: how the intervals were computed, in words.
        confidence: the confidence of all intervals together, between 0.5 and 1.
        confidence_of_each: the confidence of one interval alone.
        bonferroni_of_each: the same if correlations were ignored.
        scopes: the changes over all prompts first, then in each category, by name.
        warnings: what a reader must know, one sentence each.
        date: when they were compared, in UTC as ISO 8601; None if that is not known.
        argv: the command line; empty if another program called `compare`.
    """

    counted_by: str
    num_draft_tokens: int
    drafts: tuple[DraftName, ...]
    traffic: Mapping[str, float]
    method: str
    confidence: float
    confidence_of_each: float
    bonferroni_of_each: float
    scopes: tuple[Scope, ...]
    warnings: tuple[str, ...] = ()
    date: str | None = None
    argv: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the drafts."""
        return tuple(draft.name for draft in self.drafts)

    @property
    def is_many(self) -> bool:
        """Whether there are more drafts than a table has columns for."""
        return len(self.drafts) > MOST_COLUMNS

    @property
    def whole(self) -> Scope:
        """The changes for the given traffic, or over all prompts."""
        return self.scopes[0]

    @property
    def answer(self) -> str:
        """Which draft to use, in one sentence."""
        if not any(change.is_separable for scope in self.scopes for change in scope.changes):
            return (
                "These prompts show no clear difference between any two drafts. That is not a PASS:"
                " judge the draft that you want with 'draftquant gate' before you ship it, or"
                " record more prompts."
            )
        whole = self.whole
        if not whole.alike:
            return (
                f"For {whole.name}, {whole.best} has the longest acceptance length, clearly longer"
                " than every other draft."
            )
        return (
            f"For {whole.name}, {whole.best} has the longest acceptance length, but its difference"
            f" from {_and(whole.alike)} may be chance."
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        head = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "answer": self.answer}
        return head | asdict(self)

    def plot(self) -> str:
        """The picture of all changes with their bounds, as SVG."""
        return self._text("plot")()

    def write(
        self,
        *,
        html: AnyPath | None = None,
        plot: AnyPath | None = None,
        json: AnyPath | None = None,
        overwrite: bool = False,
    ) -> tuple[Path, ...]:
        """Write files of the comparison: all that are named, or none.

        Args:
            html: the page's file, such as "compare.html".
            plot: the picture's file, such as "compare.svg".
            json: the file with every figure, such as "compare.json".

        Returns:
            The files that were written.

        Raises:
            OutputError: a file exists, has another ending, or cannot be written; then none is.
        """
        asked: dict[ReportFormat, AnyPath | None] = {"html": html, "plot": plot, "report": json}
        return self._write(asked, overwrite=overwrite)

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "answer": self.answer,
            "drafts": ", ".join(self.names),
            "acceptance lengths": ", ".join(f"{length:.4f}" for length in self.whole.lengths),
            "K": self.num_draft_tokens,
            "prompts": self.whole.num_prompts,
            "warnings": len(self.warnings) or None,
        }


def text_of(report: ComparisonReport) -> str:
    """The text of one of its files."""
    return document_text(report.to_mapping())


def compare(
    counted: Counted,
    *,
    traffic: Mapping[str, float] | None,
    confidence: float,
    date: str,
    argv: Sequence[str],
) -> ComparisonReport:
    """Compare every pair of drafts; CompareError if they are so many that this takes gigabytes.

    `traffic` is the share of the output tokens by category; None = prompts unweighted, pooled.
    """
    CONFIDENCE.check(CompareError, "--confidence", confidence, fix="write 95 % as 0.95")
    drafts = counted.drafts
    _check_number(drafts)
    samples = samples_of(drafts, traffic or {})
    scopes, intervals = scopes_of(samples, drafts.names, confidence)
    small = [f"{s.name} ({s.num_prompts})" for s in samples if not s.is_compared]
    what = f"categories with fewer than {MIN_PROMPTS} prompts were not compared"
    return ComparisonReport(
        counted_by=counted.counted_by,
        num_draft_tokens=counted.num_draft_tokens,
        drafts=tuple(map(DraftName, drafts.names, drafts.sha256)),
        traffic=dict(traffic or {}),
        method=intervals.method,
        confidence=confidence,
        confidence_of_each=intervals.each,
        bonferroni_of_each=intervals.bonferroni_of_each,
        scopes=scopes,
        warnings=(*counted.warnings, *([f"{what}: {', '.join(small)}"] if small else [])),
        date=date,
        argv=tuple(argv),
    )


def _check_number(drafts: CountedDrafts) -> None:
    number, prompts, scopes = len(drafts.names), len(drafts.categories), len(set(drafts.categories))
    if (needed := (scopes + 1) * math.comb(number, 2) * prompts) > _MOST_VALUES:
        what = (
            f"{number} drafts in {scopes:,} categories of {prompts:,} prompts: expected at most"
            f" {_MOST_VALUES:,} contributions of prompts to estimates, got {needed:,}"
        )
        fix = "compare fewer drafts at a time, or give prompts coarser categories"
        raise CompareError("compare", what, fix=fix)


def _and(names: Sequence[str]) -> str:
    if len(names) > MOST_COLUMNS:
        return f"{len(names)} others, {names[0]} among them,"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


MOST_DRAWN = 60
"""Most scopes, or drafts where they are many, in the plot; the table has all."""


def page(report: ComparisonReport) -> str:
    """The whole page."""
    return render(
        "comparison.html.j2",
        PackageLoader(__package__, ""),
        report=report,
        compared=[scope for scope in report.scopes if scope.changes],
        small=[scope for scope in report.scopes if not scope.changes],
        plot=Markup(plot(report)),
        command=words.command(report.argv),
    )


def drawing(report: ComparisonReport) -> str:
    """The plot as a file of its own (SVG)."""
    return standalone(plot(report))


def plot(report: ComparisonReport) -> str:
    """Changes from the first draft with simultaneous intervals; of many drafts the longest."""
    first, *others = report.names
    if report.is_many:
        changes = report.whole.against_first(report.names)
        places = report.whole.ranked[1:][:MOST_DRAWN]
        rows = [_row(changes[place - 1], label=report.names[place]) for place in places]
        others = []
    else:
        compared = [scope for scope in report.scopes if scope.changes][:MOST_DRAWN]
        rows = [
            _row(change, label="" if i else scope.name, whole=scope.is_whole, series=i)
            for scope in compared
            for i, change in enumerate(scope.against_first(report.names))
        ]
    return forest(
        "comparison",
        rows,
        title=f"Change of the acceptance length against {first}",
        bounds=f"simultaneous {in_percent(report.confidence)} intervals",
        series=others,
    )


def _row(change: Change | None, **named: Any) -> Interval:
    if change is None:
        return Interval(estimate=None, **named)
    estimate, lower, upper = change.relative_change, change.lower, change.upper
    return Interval(estimate=estimate, lower=lower, upper=upper, **named)
