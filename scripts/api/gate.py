"""`gate`: may the quantized draft replace the BF16 one?

On the same traces, or by measurements of servers, or both; and by what checks of parity found. A
draft that its target taught is judged against the BF16 draft taught alike too.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.files.checkpoint import CONFIG_FILE
from ...quantize.files.command_line import running_argv
from ...quantize.files.provenance import QuantizedProvenance
from ...recipes.expectations import PolicyName
from ...validate.errors import GateError
from ...validate.judging.interim_analysis import Spending, parse_look
from . import arguments, reports
from .opening import Reference, folder_of, optional_path
from .option import Argument, Option
from .pages import Pages, asked_for
from .replay import OnTracesSettings, load_for_replay, replay_loaded
from .verb import verb

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.counting.draft_replay import DraftReplay
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.interim_analysis import Look
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Policy
    from ...validate.judging.retuned_gate import RetunedReport
    from ...validate.measure.measurement import Measurement
    from ...validate.parity.finding import Finding
    from ...validate.report.facts import Drafts, EngineFacts
    from ...validate.served.joint_report import JointReport

OF_TRACES = ("tuned_baseline", "num_draft_tokens", "target", "batch_size")
"""Fields that mean nothing without traces, and have no default."""


@dataclass(frozen=True)
class GateSettings(OnTracesSettings, Pages):
    """Which drafts are judged, by what, and by which rule."""

    baseline: Annotated[Reference | None, Argument("the draft as released", "BF16")] = None
    candidate: Annotated[Reference | None, Argument("the quantized draft", "QUANT")] = None
    traces: Annotated[arguments.AnyPath | None, Option("trace folder", "TRACES")] = None
    _: dataclasses.KW_ONLY
    tuned_baseline: Annotated[
        Reference | None,
        Option(
            "for a QUANT that 'retune' wrote, and there needed: the BF16 draft taught alike",
            "TUNED",
        ),
    ] = None
    measured: Annotated[
        Sequence[arguments.AnyPath] | None,
        Option(
            "what `measure` wrote of servers with the BF16 and with the quantized draft: instead"
            " of traces, or beside them, and the worse verdict counts",
            "A B",
            count=2,
        ),
    ] = None
    baseline_again: Annotated[
        arguments.AnyPath | None,
        Option("A measured once more: the noise of the server, held against the limit", "A2"),
    ] = None
    parity: Annotated[
        Sequence[arguments.AnyPath],
        Option("what `parity --report` wrote: each finding enters the verdict", "FILE"),
    ] = ()
    policy: Annotated[PolicyName, Option("default: release, whatever QUANT's recipe asks for")] = (
        "release"
    )
    max_relative_drop: Annotated[
        float | None,
        Option(
            "margin instead of the policy's, such as 0.01 or 1%%", "SHARE", reads=arguments.share
        ),
    ] = None
    confidence: Annotated[
        float | None, Option("instead of the policy's", "SHARE", reads=arguments.share)
    ] = None
    min_prompts: Annotated[
        int | None,
        Option(
            "effective sample size, instead of the policy's (release: 30, which takes 35 to 60"
            " prompts)",
            "PROMPTS",
        ),
    ] = None
    every_category_passes: Annotated[
        bool,
        Option("PASS only if every category with enough prompts passes, not just if none fails"),
    ] = False
    unrecorded: Annotated[
        bool,
        Option(
            "QUANT needs no draftquant.json: another tool made it, and none of these prompts"
            " calibrated it"
        ),
    ] = False
    look: Annotated[
        str | None,
        Option(
            "this is look I of N planned ones at a growing set of prompts, equal additions each",
            "I/N",
        ),
    ] = None
    spending: Annotated[
        Spending | None,
        Option(
            "how --look spends the error over the looks (default: obrien-fleming, most at the last)"
        ),
    ] = None
    unrelated: Annotated[
        bool, Option("compare two different drafts on purpose: QUANT need not be BF16 quantized")
    ] = False
    expect_baseline: Annotated[
        float | None,
        Option(
            "acceptance length that BF16 is known to have with this K: confirms an unusual one",
            "AL",
        ),
    ] = None
    report: Annotated[
        arguments.AnyPath | None, Option("also write the JSON report here", "F.json")
    ] = None

    @override
    def check(self) -> None:
        places = (("BF16", self.baseline), ("QUANT", self.candidate), ("--traces", self.traces))
        missing = [name for name, value in places if value is None]
        if missing and (self.measured is None or len(missing) < 3):
            raise GateError(
                "gate",
                f"expected BF16 QUANT --traces T, got no {', '.join(missing)}",
                fix="give all three; or two measurements, --measured A B; or all five",
            )
        if self.measured is not None and len(self.measured) != 2:
            raise GateError(
                "--measured",
                f"expected two measurements, got {len(self.measured)}",
                fix="give the baseline's and the candidate's",
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
def gate(
    settings: GateSettings,
) -> "reports.GateReport | reports.RetunedReport | reports.JointReport":
    """Judge a quantized draft against its BF16 source: PASS, FAIL, INCONCLUSIVE or ANOMALOUS.

    Example:
        >>> report = dq.gate("DRAFT", "OUT", "TRACES", min_prompts=10)
        >>> report.verdict in ("PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS")
        True
        >>> report.exit_code == 0 or bool(report.action)
        True

    Returns:
        The verdict and all that it rests on: of one comparison, of two where the target taught the
        draft, or of everything that was given beside traces or instead of them.

    Raises:
        GateError: the drafts do not belong together, or a limit is none.
        DraftQuantError: see `replay`; a file is no measurement or no report of parity; a report
            file cannot be written.
    """
    return judged(settings).report


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict, with the report file's content.

    Attributes:
        replays: of the drafts, where traces were given.
        document: the JSON object.
    """

    report: "GateReport | RetunedReport | JointReport"
    replays: "Sequence[DraftReplay]"
    document: dict[str, Any]


def judged(settings: GateSettings) -> Judged:
    """Judge by all that is given, and write the report files."""
    from ...validate.judging.policy import resolve_policy
    from ...validate.report.document import document_of, document_text, parse_report

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
    measured = _read_measured(settings)
    on_traces = None
    if settings.traces is not None:
        on_traces = judge_on_traces(measured.as_served(settings), policy, look)
    report: GateReport | RetunedReport | JointReport
    if measured.nothing and on_traces is not None:
        report = on_traces.report
    else:
        report = _judge_joint(settings, measured, on_traces, policy, look)
    drafts, engines = _judged_drafts(settings, measured, on_traces)
    argv = asked_for(running_argv())
    document = document_of(report, argv=argv, drafts=drafts, engines=engines)
    text = document_text(document)
    if report_file or settings.wants_pages:
        beside = {report_file: text} if report_file else {}
        settings.write_pages(parse_report(text, "gate"), beside=beside)
    return Judged(report=report, replays=on_traces.replays if on_traces else (), document=document)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What is judged beside traces, or instead of them."""

    runs: "tuple[Measurement, Measurement] | None"
    again: "Measurement | None"
    findings: "tuple[Finding, ...]"

    @property
    def nothing(self) -> bool:
        """Traces alone are judged."""
        return self.runs is None and not self.findings

    def as_served(self, settings: GateSettings) -> GateSettings:
        """Traces are replayed with the K that was served, where no other is asked for."""
        speculation = self.runs[0].setup.speculation if self.runs is not None else None
        if speculation is None or settings.num_draft_tokens is not None:
            return settings
        return dataclasses.replace(settings, num_draft_tokens=speculation.num_draft_tokens)


def _read_measured(settings: GateSettings) -> _Measured:
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.finding import read_findings

    runs = again = None
    if settings.measured:
        baseline, candidate = (read_measurement(Path(path)) for path in settings.measured)
        runs = baseline, candidate
    if settings.baseline_again:
        again = read_measurement(Path(settings.baseline_again))
    findings = tuple(one for path in settings.parity for one in read_findings(Path(path)))
    return _Measured(runs=runs, again=again, findings=findings)


def _judge_joint(
    settings: GateSettings,
    measured: _Measured,
    replayed: "OnTraces | None",
    policy: "Policy",
    look: "Look | None",
) -> "GateReport | JointReport":
    """The verdict on two measurements alone, or the worst of all that is given."""
    from ...validate.judging.anomalies import Background
    from ...validate.served.joint_report import judge_jointly

    background = Background(
        expected_baseline=settings.expect_baseline, unrelated=settings.unrelated
    )
    if replayed is not None:
        background = dataclasses.replace(replayed.background, head_agreement=None, warnings=())
    return judge_jointly(
        measured.runs,
        measured.again,
        None if replayed is None else replayed.report,
        measured.findings,
        policy,
        look=look,
        background=background,
    )


def _judged_drafts(
    settings: GateSettings, measured: _Measured, replayed: "OnTraces | None"
) -> "tuple[Drafts, tuple[EngineFacts, ...]]":
    """Who was judged, and what engines do with the candidate; none where no folder is at hand."""
    from ...validate.report.facts import Drafts, drafts_of, engine_facts, measured_facts

    if replayed is not None:
        names = [str(name) for name in _references(settings)]
        drafts = drafts_of(names, replayed.folders)
        return drafts, engine_facts(replayed.folders[1].folder, drafts.candidate.name)
    assert measured.runs is not None  # or there is nothing to judge, see `GateSettings.check`
    baseline, candidate = map(measured_facts, measured.runs)
    return Drafts(baseline=baseline, candidate=candidate), ()


def _references(settings: GateSettings) -> list[Reference]:
    """Baseline, candidate, and the BF16 draft taught alike where it was given."""
    names = (settings.baseline, settings.candidate, settings.tuned_baseline)
    return [name for name in names if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTraces:
    """What replays said; `background` is what they were judged with.

    Attributes:
        folders: baseline, candidate, and the BF16 draft taught alike where it was given.
    """

    replays: "Sequence[DraftReplay]"
    report: "GateReport | RetunedReport"
    background: "Background"
    folders: "tuple[DraftFolder, ...]"


def judge_on_traces(settings: GateSettings, policy: "Policy", look: "Look | None") -> OnTraces:
    """Replay both drafts, or all three, and judge the candidate.

    Raises:
        DraftQuantError: see `gate`.
    """
    from ...calibration.traces.head_agreement import head_agreement
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder, check_folders, check_loaded
    from ...validate.judging.held_out import check_held_out
    from ...validate.judging.judgement import judge
    from ...validate.judging.retuned_gate import check_tuned_baseline, judge_retuned

    assert settings.traces is not None  # nothing else is replayed
    unrelated, references = settings.unrelated, _references(settings)
    baseline, candidate, *taught = (DraftFolder.read(folder_of(name)) for name in references)
    tuned = taught[0] if taught else None
    warnings = check_folders(baseline, candidate, unrelated=unrelated)
    warnings += check_tuned_baseline(baseline, candidate, tuned, unrelated=unrelated)
    traces = TraceFolder.open(Path(settings.traces))
    warnings += check_held_out(candidate.quantized_by, traces)
    loaded = load_for_replay(references, traces, settings)
    warnings += check_loaded(*loaded.both, candidate, unrelated=unrelated)
    if tuned is not None:
        warnings += check_loaded(loaded.drafts[0], loaded.drafts[2], tuned)
    warnings += _target_warnings(optional_path(settings.target), traces) + _text_warnings(traces)
    warnings += other_policy_warnings(candidate.quantized_by, policy.name)
    replays = replay_loaded(loaded, settings)
    background = Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        head_agreement=head_agreement(traces, loaded.tables),
        expected_baseline=settings.expect_baseline,
        unrelated=unrelated,
        unrecorded=not unrelated and candidate.quantized_by is None,
        algorithm_to_try=algorithm_to_try(candidate.quantized_by),
        warnings=warnings,
    )
    report: GateReport | RetunedReport
    if tuned is None:
        report = judge(replays[0], replays[1], policy, look=look, background=background)
    else:
        report = judge_retuned(
            replays, policy, look=look, background=background, tuned_sha256=tuned.sha256
        )
    folders = (baseline, candidate) if tuned is None else (baseline, candidate, tuned)
    return OnTraces(replays=replays, report=report, background=background, folders=folders)


def other_policy_warnings(candidate: QuantizedProvenance | None, policy: str) -> tuple[str, ...]:
    """A candidate does not choose its own judge, but what its recipe asks for is said."""
    if candidate is None or policy in (candidate.recipe.gate.policy, "custom"):
        return ()
    asked = candidate.recipe.gate.policy
    return (f"the candidate's recipe asks for the policy {asked!r}, in use is {policy!r}",)


def algorithm_to_try(candidate: QuantizedProvenance | None) -> str | None:
    """What may round the candidate's four bits better than it was done."""
    if candidate is None or candidate.recipe.algorithm.rounding != "nearest":
        return None
    return None if candidate.recipe.weights.dtype == "fp8_e4m3" else "gptq"


def _text_warnings(traces: "TraceFolder") -> tuple[str, ...]:
    """Text that no user is served."""
    if not traces.manifest.ignore_eos:
        return ()
    return (
        "the traces go on behind the target's end of text (record --ignore-eos): what it writes"
        " there, often itself again, is guessed more easily than answers are",
    )


def _target_warnings(target: Path | None, traces: "TraceFolder") -> tuple[str, ...]:
    """The tables of a target that was not recorded make another draft of both."""
    from ...calibration.traces.trace_folder import file_sha256

    recorded = traces.manifest.target
    if target is None or file_sha256(target / CONFIG_FILE) == recorded.config_sha256:
        return ()
    if recorded.config_sha256 is None:
        return (
            f"the traces do not say which {CONFIG_FILE} their target {recorded.name} had: whether"
            f" --target {target.name} is that target is not known",
        )
    return (
        f"--target {target.name} has another {CONFIG_FILE} than the target {recorded.name} that was"
        " recorded: embedding and head may be those of another target",
    )
