"""`replay` and `compare`, whole: drafts are counted on one text, and the counts are written."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import open_for_drafts, origin_warnings
from ...quantize.files.hub import running_argv
from ...quantize.files.report_files import ReportFormat, write_reports
from ..comparison.draft_comparison import ComparisonReport, compare, drawing, page, text_of
from ..comparison.scopes import Counted
from ..comparison.sources import of_files, of_replays
from ..counting.draft_counts import DraftReplay
from ..counting.replaying import replay_in_groups, replay_loaded
from ..golden.golden_acceptance import golden_document
from ..golden.golden_sources import golden_of_replay
from ..judging.candidate_origin import DraftFolder
from ..report.facts import today
from .judging_asked import CompareRun, ReplayRun
from .report_pages import asked_for, draft_identity


def replay_asked(asked: ReplayRun) -> tuple[DraftReplay, ...]:
    """Replay drafts, and write the golden acceptance if there is only one."""
    traces, folders, warnings = open_for_drafts(asked.traces, asked.drafts, asked.listener)
    for warning in (*warnings, *origin_warnings(asked.target, traces)):
        asked.listener.warning(warning)
    loaded = load_for_replay(folders, traces, asked)
    replays = replay_loaded(loaded, asked)
    if fault := replays[0].traces.features.fault():
        asked.listener.warning(fault)
    if asked.golden is not None:
        identity = draft_identity(asked.drafts[0])
        named = dataclasses.replace(replays[0], name=identity.draft)
        golden = golden_document(golden_of_replay(named, draft_sha256=identity.draft_sha256))
        write_reports({Path(asked.golden): golden}, overwrite=asked.overwrite)
    return replays


def compared(asked: CompareRun) -> ComparisonReport:
    """Count the drafts, compare them, and write the requested files."""
    report = compare(
        _counted(asked),
        traffic=asked.traffic,
        confidence=asked.confidence,
        date=today(),
        argv=asked_for(running_argv()),
    )
    forms: Mapping[ReportFormat, Callable[[ComparisonReport], str]]
    forms = {"html": page, "plot": drawing, "report": text_of}
    texts = {kind: functools.partial(form, report) for kind, form in forms.items()}
    files = {path: texts[kind]() for kind, path in asked.files.items()}
    write_reports(files, overwrite=asked.overwrite)
    return report.with_texts(texts)


def _counted(asked: CompareRun) -> Counted:
    if asked.traces is None:
        return of_files([Path(path) for path in asked.drafts])
    traces, folders, warnings = open_for_drafts(asked.traces, asked.drafts, asked.listener)
    digests = [DraftFolder.read(folder).sha256 for folder in folders]
    warnings += origin_warnings(asked.target, traces)
    return of_replays(replay_in_groups(folders, traces, asked), digests, warnings)
