"""The gate, whole: reads its inputs, judges by all of them, and writes the report files."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.files.hub import running_argv
from ...recipes.errors import GoldenError
from ..counting.draft_counts import DraftReplay
from ..judging.judgement import GateReport, judge
from ..judging.policy import Look, Policy, parse_look, resolve_policy
from ..report.document import Document, document_of, document_text, parse_report
from ..report.facts import (
    DraftFacts,
    Drafts,
    EngineFacts,
    drafts_of,
    engine_facts,
    measured_facts,
    today,
)
from ..served.joint_report import JointReport, judge_jointly
from ..served.target_pair import judge_targets
from .drafts_judged import DraftsJudged, beside_targets, named, replayed
from .judging_asked import GateRun
from .measured_runs import MeasuredRuns
from .report_pages import NOTHING, asked_for, golden_file, texts_of, write_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict, with the replays where traces were given, and the report file's JSON object."""

    report: GateReport | JointReport
    replays: Sequence[DraftReplay]
    document: dict[str, Any]


def judged(asked: GateRun) -> Judged:
    """Judge by all inputs, and write the report files."""
    date = today()
    policy = resolve_policy(
        asked.policy,
        max_relative_drop=asked.max_relative_drop,
        confidence=asked.confidence,
        min_prompts=asked.min_prompts,
        every_category_passes=asked.every_category_passes,
        unrecorded=asked.unrecorded,
    )
    look = parse_look(asked.look, asked.spending)
    measured = MeasuredRuns.read(asked)
    if asked.num_draft_tokens is None:  # traces are replayed with the K that was served
        asked = dataclasses.replace(asked, num_draft_tokens=measured.num_draft_tokens)
    report: GateReport | JointReport
    if asked.traces_of_candidate is not None:
        drafts, sides = beside_targets(asked)
        report = judge_targets(*sides, policy, look=look, background=drafts.background)
    else:
        of_traces = asked.traces is not None
        drafts = replayed(asked, policy.name) if of_traces else named(asked, measured, policy.name)
        report = _judge(drafts, measured, policy, look)
    judged_drafts, engines = _drafts_and_engines(asked, measured, drafts)
    argv = asked_for(running_argv())
    document = document_of(
        report, argv=argv, drafts=judged_drafts, engines=engines, asked=drafts.engine, date=date
    )
    text = document_text(document)
    if asked.report is not None or asked.wants_pages:
        beside = {} if asked.report is None else {Path(asked.report): text}
        parsed = parse_report(text, "gate")
        write_pages(asked, parsed, {**beside, **_golden(asked, parsed, measured)})
    report = report.with_texts(texts_of(text))
    return Judged(report=report, replays=drafts.replays, document=document)


def _judge(
    drafts: DraftsJudged, measured: MeasuredRuns, policy: Policy, look: Look | None
) -> GateReport | JointReport:
    background, replayed_alone = drafts.background, None
    if drafts.replays:
        baseline, candidate = drafts.replays
        replayed_alone = judge(baseline, candidate, policy, look=look, background=background)
        if measured.nothing:
            return replayed_alone
        background = dataclasses.replace(
            background, head_agreement=None, other_target="", warnings=()
        )
    return judge_jointly(
        measured.runs,
        measured.again,
        replayed_alone,
        tuple(finding for report in measured.parity for finding in report.findings),
        policy,
        look=look,
        background=background,
        warnings=measured.check_parity(drafts.folders),
    )


def _drafts_and_engines(
    asked: GateRun, measured: MeasuredRuns, drafts: DraftsJudged
) -> tuple[Drafts, tuple[EngineFacts, ...]]:
    if drafts.folders and (drafts.replays or not any(measured.not_tied())):
        names = [str(name) for name in asked.references]
        pair = drafts_of(names, drafts.folders, asked.served_forms(len(names)))
        return pair, engine_facts(drafts.folders[1].folder, pair.candidate.name)
    runs = measured.runs
    assert runs is not None  # or there is nothing to judge
    if isinstance(runs, tuple):
        baseline, candidate = map(measured_facts, runs)
    else:
        both = (runs.baseline, runs.candidate)
        baseline, candidate = (DraftFacts(name=run.name, sha256=None) for run in both)
    return Drafts(baseline=baseline, candidate=candidate), ()


def _golden(asked: GateRun, document: Document, measured: MeasuredRuns) -> Mapping[Path, str]:
    """Golden acceptance of the candidate, served if it was; its failure loses no verdict."""
    try:
        return golden_file(asked, document, measured.own[1] if measured.own else None)
    except GoldenError as exc:
        asked.listener.warning(f"no golden acceptance is written: {exc.what}")
        return NOTHING
