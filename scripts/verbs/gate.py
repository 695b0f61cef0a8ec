"""`gate`: may the quantized draft replace the BF16 one?

On the same traces, or by measurements of servers, or both; and by what checks of parity found.
"""

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

from ...quantize.files.hub import running_argv
from ...recipes.errors import GateError, GoldenError
from ...recipes.regular_file import optional_path
from ...recipes.schema import PolicyName
from ...validate.judging.policy import Spending, parse_look
from ..frame import arguments, reports
from ..frame.console import print_json, print_table, stdout, table
from ..frame.pages import Pages, asked_for, texts_of
from ..frame.settings import Option
from ..frame.verb import verb
from ..gate_on_traces import (
    GateOnTracesSettings,
    Measured,
    OnTraces,
    background_of_named,
    check_parity,
    judge_on_traces,
    named_folders,
    not_tied,
    read_measured,
)
from .replay import print_replays

if TYPE_CHECKING:
    from ...validate.counting.draft_counts import DraftReplay
    from ...validate.counting.paired_change import PairedChange
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.judging.judgement import GateReport
    from ...validate.judging.policy import Look, Policy
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
    from ...validate.report.facts import DraftFacts, Drafts, drafts_of, engine_facts, measured_facts

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


# ---- What the gate prints: bounds, categories, the verdict and its warnings

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "ANOMALOUS": "magenta"}
BOUNDS = ("change", "lower bound", "upper bound")
Places = Mapping[str, str]
"""What commands to copy call BF16 or QUANT -> as it was given."""
NOTHING: Places = MappingProxyType({})
_PLACE = re.compile(r"\b[A-Z][A-Z0-9]+\b")


def print_gate(report: "GateReport", places: Places = NOTHING) -> None:
    """Print the statistic, the categories, the verdict and the warnings."""
    if report.served is not None:
        print_served(report)
    print_figures(report)
    _print_verdict(report, places)


def print_figures(report: "GateReport", comparison: str = "") -> None:
    """Print the statistic, the categories and who was compared."""
    from ...validate.report import words

    out = stdout()
    if report.change is not None:
        look = report.look
        planned = f", planned interim analysis {look.number} of {look.total}" if look else ""
        numbers = (*BOUNDS, "confidence", "prompts", "effective sample size")
        found = table(f"Gate{planned}{comparison}", "policy", "limit", *numbers)
        found.row(
            report.policy.name,
            f"{-report.policy.max_relative_drop:+.2%}",
            *bounds(report.change),
            f"{report.change.confidence:.2%}",
            words.prompts(report.num_prompts, report.num_short_prompts, report.num_clusters),
            f"{report.change.effective_num_prompts:.1f}",
        )
        print_table(found)
    if report.parts.all:
        _print_parts(report)
    if report.context_bins:
        lengths = (
            f"{own.category.removeprefix('context ')} {own.baseline_mean_acceptance_length:.4f} ->"
            f" {own.candidate_mean_acceptance_length:.4f}"
            for own in report.context_bins
        )
        out.line(f"acceptance length by tokens before the verify step: {', '.join(lengths)}")
    out.line(
        f"target {_target(report)}, baseline {report.baseline.name}"
        f" ({_short(report.background.baseline_sha256)}), candidate {report.candidate.name}"
        f" ({_short(report.background.candidate_sha256)})"
    )


def _target(report: "GateReport") -> str:
    if report.traces is not None:
        target = report.traces.target
        return f"{target.name} ({_short(target.weights_sha256)})"
    return report.served.model if report.served is not None else "not known"


def print_served(report: "GateReport") -> None:
    """Print one row per measurement, and what the other estimates say."""
    from ...validate.report import words

    served, out = report.served, stdout()
    assert served is not None  # of a report on measurements
    positions = [f"pos {i + 1}" for i in range(report.num_draft_tokens)]
    numbers = ("acceptance length", "as compared", *positions)
    found = table(
        f"Served by {words.server(served)}, K = {report.num_draft_tokens},"
        f" {words.prompts(report.num_prompts, report.num_short_prompts)} prompts",
        "run",
        *numbers,
        right=numbers,
    )
    lengths = (served.baseline_mean_acceptance_length, served.candidate_mean_acceptance_length)
    for figures, length in zip((report.baseline, report.candidate), lengths, strict=True):
        told = served.told_positions
        survival = (f"{share:.3f}" if told else words.NONE for share in figures.survival)
        found.row(figures.name, f"{length:.4f}", f"{figures.mean_acceptance_length:.4f}", *survival)
    print_table(found)
    if report.change is None:
        return
    if served.identical_share is None or served.common_share is None:
        out.line("the tool keeps no outputs, so nothing shows whether both servers wrote the same")
        return
    out.line(
        f"{served.identical_share:.1%} of the outputs are identical, and both servers wrote"
        f" {served.common_share:.1%} of the tokens before their outputs differed; compared by"
        f" {words.estimator(served.estimator)}"
    )
    others = (("whole outputs", served.whole_change), ("identical text only", served.common_change))
    for name, change in others:
        if change is not None:
            by, lower, upper = bounds(change)
            out.line(f"  by {name}: {by}, bounds {lower} and {upper}")


def _print_verdict(report: "GateReport", places: Places) -> None:
    out, colour = stdout(), COLOURS[report.verdict]
    out.line((report.verdict, f"bold {colour}"), f": {report.reason}")
    _print_ways_out(report.action, places)
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _print_parts(report: "GateReport") -> None:
    """Those that were judged, or lost much; a warning names the others."""
    from ...validate.report import words

    told = [own for own in report.parts.all if own.outcome or own.certainly_lost]
    if not told:
        return
    title = "Categories and context bins" if report.context_bins else "Categories"
    found = table(title, "category", "prompts", "limit", *BOUNDS, "outcome")
    for own in told:
        found.row(
            own.category,
            str(own.num_prompts),
            f"{-own.max_relative_drop:+.2%}",
            *(bounds(own.change) if own.change else ("", "", "")),
            own.outcome or "too few prompts",
        )
    print_table(found)
    if (together := words.together(report.parts)) is not None:
        stdout().line(together)


def _print_ways_out(action: str | None, places: Places) -> None:
    """What to do about a verdict, one way out a line, its command on a line of its own."""
    from ...validate.report.words import way_out

    ways = action.splitlines() if action else []
    for way in ways:
        sentence, command = way_out(way)
        stdout().line(f"  - {sentence}" if len(ways) > 1 else f"  {sentence}")
        if command:
            known = _PLACE.sub(lambda found: places.get(found[0], found[0]), command)
            stdout().line(f"      {known}")


def bounds(change: "PairedChange") -> tuple[str, str, str]:
    """A change and both of its bounds, in percent."""
    lower, upper = change.relative_bounds
    return f"{change.relative_change:+.2%}", f"{lower:+.2%}", f"{upper:+.2%}"


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "not known"


def print_joint(report: "JointReport", places: Places) -> None:
    """Print every judgement, and the worst verdict."""
    out = stdout()
    if report.replayed is not None:
        print_gate(report.replayed, places)
    if report.served is not None:
        print_served(report.served)
        print_figures(report.served, ", served")
    if report.noise is not None and report.noise.change is not None:
        found = table("The baseline measured again", "run", *BOUNDS, "equal outputs")
        found.row(
            report.noise.name,
            *bounds(report.noise.change),
            f"{report.noise.served.identical_share:.1%}",
        )
        print_table(found)
    out.line((report.verdict, f"bold {COLOURS[report.verdict]}"), ", the worst of:")
    for title, verdict, reason, _ in report.parts:
        out.line(f"  {title}: ", (verdict, COLOURS[verdict]), f". {reason}")
    _print_ways_out(report.action, places)
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


# ---- `draftquant gate`: prints the verdict, and all that it rests on

VERB = gate


def run(options: argparse.Namespace) -> int:
    """Judge, and print the verdict; its exit code."""
    from ...validate.served.joint_report import JointReport

    found = judged(options.settings)
    report = found.report
    if options.json:
        print_json(found.document)
        return report.exit_code
    if found.replays:
        print_replays(found.replays)
    places = _places(options.settings)
    if isinstance(report, JointReport):
        print_joint(report, places)
    else:
        print_gate(report, places)
    return report.exit_code


def _places(settings: GateSettings) -> Mapping[str, str]:
    """What commands to copy call BF16 and so on -> what was given here."""
    given = {
        "BF16": settings.baseline,
        "QUANT": settings.candidate,
        "TRACES": settings.traces,
        "TARGET": settings.target,
    }
    return {name: shlex.quote(str(place)) for name, place in given.items() if place is not None}
