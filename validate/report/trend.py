"""The history of releases: one line of JSON for each report of the gate, in a file that grows.

Lines are only ever added, each by one write and under a lock, so that runs beside each other lose
none. A file with any other line is refused before anything is judged.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ...quantize.files.staging import sync
from ...recipes.regular_file import open_kept, read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import GateError
from ..judging.verdict import Verdict
from .document import Document
from .facts import is_date

FORMAT: Literal["draftquant trend"] = "draftquant trend"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendEntry:
    """One report in one line.

    Attributes:
        date: of the report; None where it has none. draftquant: version that judged.
        draft, draft_sha256: the candidate's. family: of the drafts; None where none was at hand.
        recipe, recipe_sha256: None where no record says how the candidate was quantized.
        baseline, baseline_sha256: what it was compared with.
        target: name of the target; target_sha256: of its weights. traces_sha256: what was replayed.
        num_draft_tokens: K.
        change, lower, upper: relative, with one-sided bounds at `confidence`; None where nothing
            could be compared. Of several comparisons the first, whose verdict may be better than
            `verdict`, which is that of the whole report.
        limit: the relative drop that is allowed.
    """

    format: Literal["draftquant trend"] = FORMAT
    schema_version: Literal[1] = 1
    date: str | None
    draftquant: str
    verdict: Verdict
    policy: str
    draft: str
    draft_sha256: str | None
    family: str | None
    recipe: str | None
    recipe_sha256: str | None
    baseline: str
    baseline_sha256: str | None
    target: str | None
    target_sha256: str | None
    traces_sha256: str | None
    num_draft_tokens: int
    change: float | None
    lower: float | None
    upper: float | None
    confidence: float | None
    limit: float
    num_prompts: int
    effective_num_prompts: float | None

    def problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        if self.date is not None and not is_date(self.date):
            return f"date: expected YYYY-MM-DDThh:mm:ssZ, got {self.date!r}"
        figures = (self.lower, self.change, self.upper)
        known = [one for one in figures if one is not None]
        if known and (len(known) < len(figures) or sorted(known) != known or known[0] < -1):
            return "lower, change, upper: expected relative changes in this order, or null"
        if not 0 < self.limit < 1:
            return f"limit: expected a share in (0, 1), got {self.limit}"
        return ""

    @property
    def series(self) -> tuple[str | None, str | None]:
        """Reports of one series are drawn together: same family, same target."""
        return self.family, self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Reports of one family and target.

    Attributes:
        entries: in the order of the file, this one last if it is not in the file.
        own: the report that is shown.
        num_others: lines of other families or targets.
    """

    entries: tuple[TrendEntry, ...]
    own: TrendEntry
    num_others: int

    @classmethod
    def of(cls, found: Sequence[TrendEntry], own: TrendEntry) -> "History":
        """What a file has of the series of a report."""
        entries = [one for one in found if one.series == own.series]
        if _line_of(own, entries) is None:
            entries.append(own)
        others = sum(one.series != own.series for one in found)
        return cls(entries=tuple(entries), own=own, num_others=others)


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a report stands in a file; `is_new`: it was not there before."""

    line: int
    is_new: bool


def entry_of(document: Document) -> TrendEntry:
    """The line of a report."""
    _, found = document.comparisons[0]
    drafts, change = document.header.drafts, found.change
    made = drafts.candidate.quantized
    lower, upper = (None, None) if change is None else change.relative_bounds
    target = found.traces.target if found.traces is not None else None
    served = found.served.model if found.served is not None else None
    return TrendEntry(
        date=document.header.date,
        draftquant=document.header.draftquant,
        verdict=document.judgement.verdict,
        policy=found.policy.name,
        draft=drafts.candidate.name,
        draft_sha256=drafts.candidate.sha256,
        family=drafts.candidate.family or drafts.baseline.family,
        recipe=None if made is None else made.recipe,
        recipe_sha256=None if made is None else made.recipe_sha256,
        baseline=drafts.baseline.name,
        baseline_sha256=drafts.baseline.sha256,
        target=served if target is None else target.name,
        target_sha256=None if target is None else target.weights_sha256,
        traces_sha256=None if found.traces is None else found.traces.sha256,
        num_draft_tokens=found.num_draft_tokens,
        change=None if change is None else change.relative_change,
        lower=lower,
        upper=upper,
        confidence=None if change is None else change.confidence,
        limit=found.policy.max_relative_drop,
        num_prompts=found.num_prompts,
        effective_num_prompts=None if change is None else change.effective_num_prompts,
    )


def read_trend(path: Path) -> tuple[TrendEntry, ...]:
    """Every line of a history.

    Raises:
        GateError: it cannot be read, or one of its lines is not of a report.
    """
    try:
        return _parsed(read_text(path), path)
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def append_report(path: Path, entry: TrendEntry) -> Appended:
    """Add the line of a report to a history, which is made if need be.

    A report that is there already, at whatever date, is not added again.

    Args:
        path: of the history.
        entry: of the report.

    Raises:
        GateError: as of `read_trend`, or it cannot be written; then it is as it was before.
    """
    try:
        descriptor = open_kept(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = _parsed(read_text(path), path)
            known = _line_of(entry, before)
            if known is not None:
                return Appended(known, is_new=False)
            _append(descriptor, f"{json.dumps(asdict(entry), allow_nan=False)}\n".encode())
        finally:
            os.close(descriptor)
        sync(path.absolute().parent)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return Appended(len(before) + 1, is_new=True)


def _append(descriptor: int, line: bytes) -> None:
    """One write; where the disk takes part of it alone, none of it stays."""
    size = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("the disk is full")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _parsed(text: str, path: Path) -> tuple[TrendEntry, ...]:
    *lines, rest = text.split("\n")
    if rest:
        raise GateError(
            f"{path}:{len(lines) + 1}",
            "has no line end: what stands there was cut off",
            fix="remove this line, and run the gate of that draft again with --trend",
        )
    return tuple(_entry(line, f"{path}:{number}") for number, line in enumerate(lines, 1))


def _entry(line: str, where: str) -> TrendEntry:
    try:
        entry: TrendEntry = decode(TrendEntry, parse_object(line))
    except JsonProblem as exc:
        raise GateError(
            where,
            f"is no line that 'gate --trend' wrote: {exc}",
            fix="give a file of --trend, or remove this line",
        ) from exc
    return entry


def _line_of(entry: TrendEntry, entries: Sequence[TrendEntry]) -> int | None:
    """Its number from 1 on, whatever its date; None where it is not among them."""
    undated = [dataclasses.replace(one, date=None) for one in entries]
    own = dataclasses.replace(entry, date=None)
    return undated.index(own) + 1 if own in undated else None


def _unreadable(path: Path, exc: OSError) -> GateError:
    return GateError(
        path,
        f"the history cannot be read and written: {exc.strerror or exc}",
        fix="give a file of your own to --trend",
    )
