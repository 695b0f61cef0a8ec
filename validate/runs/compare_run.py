"""`compare`, whole: counts drafts by traces or by files, and writes the comparison."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from ...calibration.passes.on_traces import open_with_warnings
from ...quantize.files.hub import folder_of, running_argv
from ...quantize.files.report_files import ReportFormat, write_reports
from ..comparison.draft_comparison import ComparisonReport, compare, drawing, page, text_of
from ..comparison.sources import Counted, of_files, of_replays
from ..counting.position_limits import position_warnings
from ..counting.replaying import replay_in_groups
from ..judging.candidate_origin import DraftFolder
from ..judging.published import Texts
from ..report.facts import today
from .asked import CompareRun
from .report_pages import asked_for


def compared(asked: CompareRun) -> ComparisonReport:
    """Count the drafts, compare them, and write the files that are asked for.

    Raises:
        DraftQuantError: a draft, the traces or a file cannot be read, or they do not have the same
            prompts.
    """
    date = today()
    counted = _counted(asked)
    report = compare(
        counted.drafts,
        num_draft_tokens=counted.num_draft_tokens,
        counted_by=counted.counted_by,
        traffic=asked.traffic,
        confidence=asked.confidence,
        warnings=counted.warnings,
        date=date,
        argv=asked_for(running_argv()),
    )
    texts = _texts(report)
    files = {path: texts[kind]() for kind, path in asked.files.items()}
    write_reports(files, overwrite=asked.overwrite)
    return report.with_texts(texts)


def _counted(asked: CompareRun) -> Counted:
    """What is compared; without traces the files say it."""
    if asked.traces is None:
        return of_files([Path(path) for path in asked.drafts])
    traces, warnings = open_with_warnings(asked.traces, asked.listener)
    folders = [folder_of(draft) for draft in asked.drafts]
    warnings += position_warnings(folders, traces, asked.listener)
    digests = [DraftFolder.read(folder).sha256 for folder in folders]
    return of_replays(replay_in_groups(folders, traces, asked), digests, warnings)


def _texts(report: ComparisonReport) -> Texts:
    """What makes the files of a comparison."""
    forms: Mapping[ReportFormat, Callable[[ComparisonReport], str]]
    forms = {"html": page, "plot": drawing, "report": text_of}
    return {kind: functools.partial(form, report) for kind, form in forms.items()}
