"""`gate`: may the quantized draft replace the BF16 one?

On the same traces, or by measurements of servers, or both; and by what checks of parity found.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.files.command_line import running_argv
from ...recipes.expectations import PolicyName
from ...validate.errors import GateError, GoldenError
from ...validate.judging.interim_analysis import Spending, parse_look
from . import arguments, reports
from .gate_measured import Measured, read_measured
from .gate_named_drafts import background_of_named, check_parity, named_folders, not_tied
from .gate_on_traces import GateOnTracesSettings, OnTraces, judge_on_traces
from .option import Option
from .pages import Pages, asked_for, texts_of
from .references import optional_path
from .verb import verb

if TYPE_CHECKING:
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.interim_analysis import Look
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy
    from ...validate.report.document import Document
    from ...validate.report.facts import Drafts, EngineFacts
    from ...validate.served.joint_report import JointReport

OF_TRACES = ("num_draft_tokens", "target", "batch_size", "head_online", "ray")
"""Fields that mean nothing without traces, and have no default."""
_NAMES = ["BF16", "QUANT", "--traces"]


@dataclass(frozen=True)
class GateSettings(GateOnTracesSettings, Pages):
    """Which drafts are judged, by what, and by which rule."""

    _: dataclasses.KW_ONLY
    measured: Annotated[
        Sequence[arguments.AnyPath] | None,
        Option(
            "measurements ('measure', or of another tool: docs/foreign-numbers.md) of servers with"
            " the BF16 and with the quantized draft; given with traces, the worse verdict counts",
            "A B",
            count=2,
        ),
    ] = None
    baseline_again: Annotated[
        arguments.AnyPath | None,
        Option("a second measurement of A; it shows the server's own noise", "A2"),
    ] = None
    parity: Annotated[
        Sequence[arguments.AnyPath],
        Option("reports of 'parity --report'; each finding enters the verdict", "FILE"),
    ] = ()
    policy: Annotated[PolicyName, Option("set of limits to judge by (default: release)")] = (
        "release"
    )
    max_relative_drop: Annotated[
        float | None,
        Option(
            "largest tolerated relative drop of the acceptance length, such as 0.01 "
            "or 1%% (default: the policy's)",
            "SHARE",
            reads=arguments.share,
        ),
    ] = None
    confidence: Annotated[
        float | None,
        Option("confidence of each bound (default: the policy's)", "SHARE", reads=arguments.share),
    ] = None
    min_prompts: Annotated[
        int | None,
        Option(
            "smallest effective sample size (default: the policy's; release: 30, "
            "which takes 35 to 60 prompts)",
            "PROMPTS",
        ),
    ] = None
    every_category_passes: Annotated[
        bool,
        Option("PASS only if every category with enough prompts passes (default: if none fails)"),
    ] = False
    unrecorded: Annotated[
        bool,
        Option("another tool made QUANT; you assert that it was not calibrated on these prompts"),
    ] = False
    look: Annotated[
        str | None,
        Option(
            "planned interim analysis I of N on a growing set of prompts (equal "
            "additions each time)",
            "I/N",
        ),
    ] = None
    spending: Annotated[
        Spending | None,
        Option(
            "how the interim analyses share the error rate (default: obrien-fleming, "
            "which spends most of it on the last)"
        ),
    ] = None
    report: Annotated[
        arguments.AnyPath | None, Option("also write the report as JSON", "F.json")
    ] = None

    @override
    def check(self) -> None:
        places = zip(_NAMES, (self.baseline, self.candidate, self.traces), strict=True)
        missing = [name for name, value in places if value is None]
        measured_alone = self.measured is not None and missing in (_NAMES, _NAMES[2:])
        if missing and not measured_alone:
            absent = f"add {' '.join(missing).replace('--traces', '--traces T')}"
            raise GateError(
                "gate",
                f"expected BF16 QUANT --traces T, got no {', '.join(missing)}",
                fix=f"{absent} (draftquant record writes T); for servers: --measured A B,"
                " with BF16 and QUANT or without",
            )
        if self.baseline_again and not self.measured:
            raise GateError(
                "--baseline-again",
                "expected --measured A B beside it",
                fix="add the two measurements",
            )
        idle = [name for name in OF_TRACES if getattr(self, name) is not None]
        if missing and idle:
            raise GateError(
                f"--{idle[0].replace('_', '-')}",
                "is of use for traces only, and none are given",
                fix="leave it out, or give BF16 QUANT --traces T too",
            )


@verb(GateSettings)
def gate(settings: GateSettings) -> "reports.GateReport | reports.JointReport":
    """Judge a quantized draft against its BF16 source: PASS, FAIL, INCONCLUSIVE or ANOMALOUS.

    Example:
        >>> report = dq.gate("DRAFT", "OUT", "TRACES", min_prompts=10)
        >>> report.verdict in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
        True
        >>> report.exit_code == 0 or bool(report.action)
        True

    Returns:
        The verdict with all its evidence. It is a `GateReport` for one comparison, and a
        `JointReport` where measurements or parity were judged beside traces. Each writes its page,
        Markdown, JUnit and JSON by methods.

    Raises:
        GateError: the drafts do not belong together, or a limit is out of its range.
        DraftQuantError: a draft, the traces, a measurement or a parity report cannot be read, they
            do not fit each other or do not fit in memory, or a report file cannot be written.
    """
    return judged(settings).report


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict, with the report file's content.

    Attributes:
        replays: of the drafts, where traces were given.
        document: the JSON object.
    """

    report: "GateReport | JointReport"
    replays: "Sequence[DraftReplay]"
    document: dict[str, Any]


def judged(settings: GateSettings) -> Judged:
    """Judge by all that is given, and write the report files."""
    from ...validate.judging.policy import resolve_policy
    from ...validate.report.document import document_of, document_text, parse_report
    from ...validate.report.facts import today

    date = today()
    report_file = optional_path(settings.report)
    settings.check_pages(report_file)
    policy = resolve_policy(
        settings.policy,
        max_relative_drop=settings.max_relative_drop,
        confidence=settings.confidence,
        min_prompts=settings.min_prompts,
        every_category_passes=settings.every_category_passes,
        unrecorded=settings.unrecorded,
    )
    look = parse_look(settings.look, settings.spending)
    measured = read_measured(settings.measured, settings.baseline_again, settings.parity)
    on_traces = None
    if settings.traces is not None:
        on_traces = judge_on_traces(_as_served(settings, measured), policy, look)
    folders = named_folders(settings) if on_traces is None else on_traces.folders
    report: GateReport | JointReport
    if measured.nothing and on_traces is not None:
        report = on_traces.report
    else:
        report = _judge_joint(settings, measured, on_traces, folders, policy, look)
    drafts, engines = _judged_drafts(settings, measured, folders)
    argv = asked_for(running_argv())
    document = document_of(report, argv=argv, drafts=drafts, engines=engines, date=date)
    text = document_text(document)
    if report_file or settings.wants_pages:
        beside = {report_file: text} if report_file else {}
        found = parse_report(text, "gate")
        beside |= _golden_file(settings, found, measured)
        settings.write_pages(found, beside=beside)
    report = report.with_texts(texts_of(text))
    return Judged(report=report, replays=on_traces.replays if on_traces else (), document=document)


def _golden_file(
    settings: GateSettings, document: "Document", measured: Measured
) -> Mapping[Path, str]:
    """Golden acceptance of the candidate, served where it was; a verdict is not lost for it."""
    try:
        served = measured.runs[1] if isinstance(measured.runs, tuple) else None
        return settings.golden_file(document, served)
    except GoldenError as exc:
        settings.listener.warning(f"no golden acceptance is written: {exc.what}")
        return {}


def _as_served(settings: GateSettings, measured: Measured) -> GateSettings:
    """Traces are replayed with the K that was served, where no other is asked for."""
    if measured.runs is None or settings.num_draft_tokens is not None:
        return settings
    return dataclasses.replace(settings, num_draft_tokens=measured.num_draft_tokens)


def _judge_joint(
    settings: GateSettings,
    measured: Measured,
    replayed: "OnTraces | None",
    folders: "Sequence[DraftFolder]",
    policy: "Policy",
    look: "Look | None",
) -> "GateReport | JointReport":
    """The verdict on two measurements alone, or the worst of all that is given."""
    from ...validate.served.joint_report import judge_jointly

    if replayed is None:
        background = background_of_named(settings, folders, measured, policy.name)
    else:
        background = dataclasses.replace(replayed.background, head_agreement=None, warnings=())
    return judge_jointly(
        measured.runs,
        measured.again,
        None if replayed is None else replayed.report,
        measured.findings,
        policy,
        look=look,
        background=background,
        warnings=check_parity(measured, folders),
    )


def _judged_drafts(
    settings: GateSettings, measured: Measured, folders: "Sequence[DraftFolder]"
) -> "tuple[Drafts, tuple[EngineFacts, ...]]":
    """Who was judged, and what engines do with the candidate; none where no folder is at hand."""
    from ...validate.report.facts import (
        DraftFacts,
        Drafts,
        drafts_of,
        engine_facts,
        measured_facts,
    )

    if folders and (settings.traces is not None or not any(not_tied(measured))):
        names = [str(name) for name in settings.references]
        drafts = drafts_of(names, folders, settings.served_forms(len(names)))
        return drafts, engine_facts(folders[1].folder, drafts.candidate.name)
    assert measured.runs is not None  # or there is nothing to judge, see `GateSettings.check`
    if not isinstance(measured.runs, tuple):
        both = measured.runs.baseline, measured.runs.candidate
        served = [DraftFacts(name=one.name, sha256=None) for one in both]
    else:
        served = [measured_facts(one) for one in measured.runs]
    return Drafts(baseline=served[0], candidate=served[1]), ()
