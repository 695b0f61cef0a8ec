"""`draftquant compare`: several drafts on the same prompts; which one for which traffic?"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import ReportFormat, check_reports, write_reports
from ..api.replay import load_for_replay, replay_loaded
from ..console import OnTerminal, print_json, print_table, stderr, stdout, table
from .common import share
from .replaying import add_replay_arguments, settings_of

if TYPE_CHECKING:
    from ...validate.comparison.draft_comparison import Change, ComparisonReport
    from ...validate.comparison.sources import Counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`compare DRAFT... --traces T`, `compare FILE...`."""
    parser.add_argument(
        "drafts",
        nargs="+",
        metavar="DRAFT",
        help="drafts, the baseline first; without --traces files: what 'gate --report' wrote of"
        " several drafts and one baseline, what 'replay --json' printed, or what 'measure' wrote of"
        " each",
    )
    add_replay_arguments(parser, traces_required=False)
    parser.add_argument(
        "--traffic",
        type=traffic,
        metavar="C=SHARE,...",
        help="share of your output tokens by category of prompts, such as chat=0.7,code=0.3"
        " (default: the prompts as they are)",
    )
    parser.add_argument(
        "--confidence",
        type=share,
        default=0.95,
        metavar="SHARE",
        help="of all intervals together (default 0.95)",
    )
    parser.add_argument("--html", type=Path, metavar="F.html", help="write it as a page")
    parser.add_argument("--plot", type=Path, metavar="F.svg", help="draw it")
    parser.add_argument("--report", type=Path, metavar="F.json", help="also write the JSON here")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist already")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...validate.charts.svg import standalone
    from ...validate.comparison.comparison_page import page, plot
    from ...validate.comparison.draft_comparison import compare
    from ...validate.report.document import document_text

    kinds: tuple[ReportFormat, ...] = ("html", "plot", "report")
    asked = {kind: path for kind in kinds if (path := getattr(options, kind)) is not None}
    check_reports(asked, overwrite=options.overwrite)
    counted = _counted(options)
    report = compare(
        counted.drafts,
        num_draft_tokens=counted.num_draft_tokens,
        counted_by=counted.counted_by,
        traffic=options.traffic,
        confidence=options.confidence,
        warnings=counted.warnings,
    )
    writers = {
        "html": lambda: page(report),
        "plot": lambda: standalone(plot(report)),
        "report": lambda: document_text(report.to_mapping()),
    }
    write_reports(
        {path: writers[kind]() for kind, path in asked.items()}, overwrite=options.overwrite
    )
    if options.json:
        print_json(report.to_mapping())
    else:
        _print(report)
    for path in asked.values():
        stderr().line((str(path), "bold"), ": the comparison")
    return 0


def traffic(text: str) -> Mapping[str, float]:
    """Shares by category: chat=0.7,code=30%.

    Raises:
        argparse.ArgumentTypeError: it is none, or names a category twice.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        if not name or not equals or name in found:
            raise argparse.ArgumentTypeError(
                f"expected CATEGORY=SHARE,..., each once, such as chat=0.7,code=0.3; got {text!r}"
            )
        found[name] = share(number)
    return found


def _counted(options: argparse.Namespace) -> "Counted":
    """What is compared; without traces the files say it.

    Raises:
        CompareError: see `of_files`, or an option is of no use.
    """
    from ...validate.comparison.sources import of_files, of_replays
    from ...validate.errors import CompareError
    from ...validate.judging.candidate_origin import DraftFolder

    if options.traces is None:
        for name in ("num_draft_tokens", "target", "batch_size"):
            if getattr(options, name) is not None:
                raise CompareError(
                    f"--{name.replace('_', '-')}",
                    "is of use for traces only, and none are given",
                    fix="leave it out, or give drafts and --traces T",
                )
        return of_files([Path(path) for path in options.drafts])
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(options.traces)
    digests = [DraftFolder.read(resolve_draft(name).folder).sha256 for name in options.drafts]
    settings, watch = settings_of(options), OnTerminal()
    loaded = load_for_replay(options.drafts, traces, settings, watch)
    return of_replays(replay_loaded(loaded, settings, watch), digests)


def _print(report: "ComparisonReport") -> None:
    out = stdout()
    numbers = ("prompts", "acceptance length", "change", "lower bound", "upper bound")
    found = table(
        f"Comparison, K = {report.num_draft_tokens}, against {report.names[0]}",
        "of",
        "draft",
        *numbers,
        "",
        right=numbers,
    )
    for scope in report.scopes:
        if not scope.changes:
            continue  # a warning names it
        changes = (None, *scope.against_first(report.names))
        for place, (name, change) in enumerate(zip(report.names, changes, strict=True)):
            head = ("", "") if place else (scope.name, str(scope.num_prompts))
            mark = "most" if name == scope.best and not scope.alike else ""
            cells = _cells(change)
            found.row(head[0], name, head[1], f"{scope.lengths[place]:.4f}", *cells, mark)
    print_table(found)
    out.line(
        f"bounds hold together with {report.confidence:.2%}, each alone has"
        f" {report.confidence_of_each:.2%} ({report.method})"
    )
    out.line((report.answer, "bold"))
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _cells(change: "Change | None") -> tuple[str, str, str]:
    if change is None:
        return ("", "", "")
    return (f"{change.relative_change:+.2%}", f"{change.lower:+.2%}", f"{change.upper:+.2%}")
