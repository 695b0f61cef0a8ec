"""`compare`: several drafts on the same prompts; which one for which traffic?"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.hub import Reference, folder_of, resolve_draft, running_argv
from ...quantize.files.report_files import ReportFormat, check_reports, write_reports
from ...recipes.decode import MisfitError
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.arguments import share
from ..frame.console import print_json, print_table, stderr, stdout, table
from ..frame.pages import asked_for, given
from ..frame.settings import Argument, Option
from ..frame.verb import verb
from ..loaded_drafts import load_beside, load_for_replay, memory_of
from .replay import OnTracesSettings, note_memory, replay_beside, replay_cache, replay_loaded

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.comparison.draft_comparison import ComparisonReport
    from ...validate.comparison.scopes import Change, Scope
    from ...validate.comparison.sources import Counted
    from ...validate.counting.draft_counts import DraftReplay
    from ...validate.judging.published import Texts

# ---- Replay of any number of drafts: in groups that fit in memory, each beside the first draft
#
# What the first draft proposes is computed once, or recalled, for all groups.

MOST_TOGETHER = 8
"""Drafts that share one reading of the traces beside the first; more would save no more time."""


def replay_in_groups(
    references: Sequence[Reference], traces: "TraceFolder", settings: OnTracesSettings
) -> "tuple[DraftReplay, ...]":
    """Replay drafts, each exactly as `replay` does beside the first.

    Args:
        references: folders or Hub ids, the first one first.
        traces: to replay.
        settings: how.

    Raises:
        DeviceError: the first draft and one other do not fit in memory together.
        DraftQuantError: see `replay`.
    """
    from ...validate.counting.replay_cache import HeldProposals

    settings = _alike(references, settings)
    estimate = memory_of(references, traces, settings, in_turn=True)
    groups = estimate.groups(MOST_TOGETHER)
    if len(groups) <= 1:
        return replay_loaded(load_for_replay(references, traces, settings), settings)
    estimate.in_turn.check()
    listener, names = settings.listener, [one.name for one in estimate.drafts]
    listener.note(
        f"{len(names)} drafts in {len(groups)} groups of at most {max(map(len, groups))}, each"
        f" beside {names[0]}; at most {estimate.in_turn.line()}"
    )
    first = dataclasses.replace(
        load_for_replay(references[:1], traces, settings), max_tokens=estimate.max_tokens
    )
    held = HeldProposals(beneath=replay_cache(listener, no_cache=settings.no_cache))
    replays: list[DraftReplay] = []
    for group in groups:
        listener.note(f"replay of drafts {group.start} to {group.stop - 1} of {len(names) - 1}")
        loaded = load_beside(first, references[group.start : group.stop], settings)
        baseline, *others = replay_beside(loaded, settings, held)
        replays += others if replays else [baseline, *others]
    note_memory(listener, first.device)
    return tuple(replays)


def _alike(references: Sequence[Reference], settings: OnTracesSettings) -> OnTracesSettings:
    """The settings with which all groups run the same prompts together.

    A draft that rounds its inputs under one scale of a whole call gets one prompt at a time, and so
    do all drafts that it is compared with, also those of other groups.
    """
    from ...quantize.files.checkpoint import Checkpoint
    from ...quantize.stored.stored_draft import StoredDraft

    stored = (StoredDraft.read(Checkpoint.open(folder_of(one))) for one in references)
    if all(one.rounds_alone for one in stored):
        return settings
    return dataclasses.replace(settings, batch_size=1)


def shares_by_category(text: str) -> Mapping[str, float]:
    """Shares by category: chat=0.7,code=30%.

    Raises:
        MisfitError: it is none, or names a category twice.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        if not name or not equals or name in found:
            raise MisfitError(
                f"expected CATEGORY=SHARE,..., each once, such as chat=0.7,code=0.3; got {text!r}"
            )
        found[name] = share(number)
    return found


@dataclass(frozen=True, slots=True)
class CompareSettings(OnTracesSettings):
    """Which drafts on which prompts, and what your traffic is like."""

    drafts: Annotated[
        Sequence[Reference],
        Argument(
            "drafts, the baseline first; without --traces, files instead: reports of "
            "'gate --report' with one baseline, output of 'replay --json', or "
            "measurements of 'measure' or of another tool",
            "DRAFT",
        ),
    ]
    traces: Annotated[AnyPath | None, Option("trace folder", "TRACES")] = None
    _: KW_ONLY
    traffic: Annotated[
        Mapping[str, float] | None,
        Option(
            "share of your output tokens by category of prompts, such as chat=0.7,code=0.3"
            " (default: the prompts as they are)",
            "C=SHARE,...",
            count=1,
            reads=shares_by_category,
        ),
    ] = None
    confidence: Annotated[
        float, Option("joint confidence of all intervals (default 0.95)", "SHARE", reads=share)
    ] = 0.95
    html: Annotated[AnyPath | None, Option("write the comparison as an HTML page", "F.html")] = None
    plot: Annotated[AnyPath | None, Option("draw the comparison", "F.svg")] = None
    report: Annotated[AnyPath | None, Option("also write the comparison as JSON", "F.json")] = None
    overwrite: Annotated[bool, Option("replace files that exist already")] = False

    @property
    def files(self) -> dict[ReportFormat, Path]:
        """What is written."""
        return given({"html": self.html, "plot": self.plot, "report": self.report})

    def check(self) -> None:
        """The files can be written, and nothing is asked for that files do not say."""
        from ...recipes.errors import CompareError

        check_reports(self.files, overwrite=self.overwrite)
        if self.traces is not None:
            return
        for name in ("num_draft_tokens", "target", "batch_size"):
            if getattr(self, name) is not None:
                raise CompareError(
                    f"--{name.replace('_', '-')}",
                    "is of use for traces only, and none are given",
                    fix="leave it out, or give drafts and --traces T",
                )


@verb(CompareSettings)
def compare(settings: CompareSettings) -> "reports.ComparisonReport":
    """Compare several drafts on the same prompts, to find out which one suits your traffic.

    Returns:
        The acceptance length of every draft, and the relative change between every two drafts, over
        all prompts and in each category. All intervals hold together at the given confidence.

    Raises:
        DraftQuantError: a draft, the traces or a file cannot be read, or they do not have the same
            prompts.
    """
    from ...validate.comparison import draft_comparison
    from ...validate.report.facts import today

    date = today()
    counted = _counted(settings)
    report = draft_comparison.compare(
        counted.drafts,
        num_draft_tokens=counted.num_draft_tokens,
        counted_by=counted.counted_by,
        traffic=settings.traffic,
        confidence=settings.confidence,
        warnings=counted.warnings,
        date=date,
        argv=asked_for(running_argv()),
    )
    texts = _texts(report)
    files = {path: texts[kind]() for kind, path in settings.files.items()}
    write_reports(files, overwrite=settings.overwrite)
    return report.with_texts(texts)


def _counted(settings: CompareSettings) -> "Counted":
    """What is compared; without traces the files say it."""
    from ...calibration.passes.on_traces import open_with_warnings
    from ...validate.comparison.sources import of_files, of_replays
    from ...validate.judging.candidate_origin import DraftFolder
    from ..position_limits import position_warnings

    if settings.traces is None:
        return of_files([Path(path) for path in settings.drafts])
    traces, warnings = open_with_warnings(settings.traces, settings.listener)
    folders = [resolve_draft(str(draft)).folder for draft in settings.drafts]
    warnings += position_warnings(settings.drafts, traces, settings.listener)
    digests = [DraftFolder.read(folder).sha256 for folder in folders]
    return of_replays(replay_in_groups(settings.drafts, traces, settings), digests, warnings)


def _texts(report: "ComparisonReport") -> "Texts":
    """What makes the files of a comparison."""
    from ...validate.comparison.draft_comparison import drawing, page, text_of

    forms: Mapping[ReportFormat, Callable[[ComparisonReport], str]]
    forms = {"html": page, "plot": drawing, "report": text_of}
    return {kind: functools.partial(form, report) for kind, form in forms.items()}


# ---- `draftquant compare`: several drafts on the same prompts; which one for which traffic?

VERB = compare
_MOST_OF_A_PART = 5
"""Rows of a category, where drafts are many."""


def run(options: argparse.Namespace) -> int:
    """Compare, and print what was found."""
    report = compare.run(options.settings)
    if options.json:
        print_json(report.to_mapping())
    else:
        _print(report)
    for path in options.settings.files.values():
        stderr().line((str(path), "bold"), ": the comparison")
    return 0


def _print(report: "ComparisonReport") -> None:
    out = stdout()
    numbers = ("prompts", "acceptance length", "change", "lower bound", "upper bound")
    found = table(
        f"Comparison, K = {report.num_draft_tokens}, against {report.names[0]}",
        "category",
        "draft",
        *numbers,
        "",
        right=numbers,
    )
    for scope in report.scopes:
        if not scope.changes:
            continue  # a warning names it
        changes = (None, *scope.against_first(report.names))
        shown = _shown(scope, report)
        for row, place in enumerate(shown):
            name = report.names[place]
            head = ("", "") if row else (scope.name, str(scope.num_prompts))
            mark = "longest" if name == scope.best and not scope.alike else ""
            cells = _cells(changes[place])
            found.row(head[0], name, head[1], f"{scope.lengths[place]:.4f}", *cells, mark)
        if left := len(report.names) - len(shown):
            found.row("", f"{left} more, see --html or --report", *("",) * 6)
    print_table(found)
    out.line(
        f"all bounds hold together with {report.confidence:.2%} confidence; each of them alone has"
        f" {report.confidence_of_each:.2%} ({report.method})"
    )
    out.line((report.answer, "bold"))
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _shown(scope: "Scope", report: "ComparisonReport") -> list[int]:
    """Numbers of the drafts: all; of many all over the whole, the first and the best of a part.

    The baseline first, and of many the others by their acceptance length.
    """
    if not report.is_many:
        return list(range(len(report.names)))
    ranked = scope.ranked
    return ranked if scope.is_whole else ranked[:_MOST_OF_A_PART]


def _cells(change: "Change | None") -> tuple[str, str, str]:
    if change is None:
        return ("", "", "")
    return (f"{change.relative_change:+.2%}", f"{change.lower:+.2%}", f"{change.upper:+.2%}")
