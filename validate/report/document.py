"""The report of the gate as a JSON document (docs/reference/report.md), and its strict reading.

A report that is read is judged again: the histograms of every prompt, the policy, the look and the
background are taken as written, and so is what no counts show. All else must follow from them.
Sentences are not compared but written anew, so that a later version may word them better.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import GateError, short
from ...recipes.packages import package_version
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..counting.acceptance_counts import AcceptanceCounts, estimand, pooled
from ..counting.draft_counts import CountedDraft, PromptCounts, TextFigures
from ..judging.figures import ROUNDING, DraftFigures, differences
from ..judging.judgement import GateReport, counted, judge_counts
from ..judging.policy import REPLAYED
from ..parity.finding import ParityFinding
from ..served.foreign_gate import FOREIGN
from ..served.joint_report import JointReport, joint_report
from ..served.served_gate import (
    DRIFT_CONFIDENCE,
    SERVED,
    ServerNoise,
    judged_noise,
    on_servers,
)
from ..served.target_pair import TARGETS
from .facts import DraftFacts, Drafts, EngineFacts, environment, is_date
from .words import DRAFTS, SideNames
from .words import SERVERS as OF_SERVERS
from .words import TARGETS as OF_TARGETS

Judgement = GateReport | JointReport
"""A comparison of two drafts, or several judgements."""
_INCOMPARABLE = ": no comparison is possible."
_FOLLOWING = (
    "verdict", "looser_than_release", "num_prompts", "num_copies", "num_short_prompts",
    "baseline", "candidate", "change", "change_without_seen", "change_without_loops",
    "required_num_prompts", "categories", "context_bins", "prompts",
    "num_clusters", "relative_change", "exit_code",
)  # fmt: skip
"""Keys of a comparison that follow from its counts and limits."""
_WORDED = ("reason", "action", "warnings", "estimand")
_MOST_LEFT_OUT = 1_000_000


class _EditedError(Exception):
    """What does not follow, and where."""


def judged_again(judgement: Judgement) -> tuple[Judgement, str]:
    """What was read, with the sentences of this version; and what does not follow, or ""."""
    try:
        if isinstance(judgement, GateReport):
            return _compared(judgement, _compare(judgement)), ""
        return _joint(judgement), ""
    except _EditedError as exc:
        return judgement, str(exc)
    except GateError as exc:  # counts that the gate refuses
        return judgement, exc.what


def _compare(written: GateReport) -> GateReport:
    if not 0 <= written.num_short_prompts <= _MOST_LEFT_OUT:
        raise _EditedError(f"num_short_prompts: got {written.num_short_prompts}")
    incomparable = ""
    if not written.prompts and written.reason.endswith(_INCOMPARABLE):
        incomparable = written.reason.removesuffix(_INCOMPARABLE)
    elif not written.prompts and not written.num_short_prompts:
        raise _EditedError("prompts: expected one at least")
    wording = REPLAYED
    if written.served is not None:
        wording = SERVED if written.served.tool is None else FOREIGN
        wording = TARGETS if written.served.of_targets else wording
        wording = on_servers(written.served.apart) if written.served.apart else wording
    report = judge_counts(
        _draft(written, of_candidate=False),
        _draft(written, of_candidate=True),
        written.policy,
        incomparable=incomparable,
        estimand=_estimand(written),
        wording=wording,
        look=written.look,
        background=written.background,
    )
    if incomparable:  # no counts show why
        report = dataclasses.replace(report, action=written.action)
    key = "every_position_mean_acceptance_length"  # for replays only, and taken as written
    baseline, candidate = (
        dataclasses.replace(f, **{key: getattr(read, key)})
        for f, read in ((report.baseline, written.baseline), (report.candidate, written.candidate))
    )
    return dataclasses.replace(
        report,
        baseline=baseline,
        candidate=candidate,
        served=written.served,
        draft_sampling=written.draft_sampling,
    )


def _compared(report: GateReport, again: GateReport) -> GateReport:
    _check(report, {key: getattr(again, key) for key in _FOLLOWING})
    return dataclasses.replace(report, **{key: getattr(again, key) for key in _WORDED})


def _estimand(report: GateReport) -> str:
    """For traces it is known; what a server did is taken as written."""
    traces = report.traces
    if traces is None:
        return report.estimand
    return estimand(traces.temperature, traces.sampling, report.draft_sampling or "greedy")


def _draft(report: GateReport, *, of_candidate: bool) -> CountedDraft:
    figures = report.candidate if of_candidate else report.baseline
    told = counted(report, of_candidate=of_candidate)
    _check_pooled(report, figures, told)
    nothing = AcceptanceCounts(histogram=(0.0,) * (report.num_draft_tokens + 1))
    short_one = PromptCounts(id="", category="", prompt_sha256="", counts=nothing)
    return CountedDraft(
        name=figures.name,
        num_draft_tokens=report.num_draft_tokens,
        prompts=(*told, *[short_one] * report.num_short_prompts),
        counts=AcceptanceCounts(histogram=figures.histogram),
        text=_text(report),
    )


def _text(report: GateReport) -> TextFigures:
    if report.traces is not None:
        return report.traces.text
    if report.served is None:
        raise _EditedError("traces, served: expected one of them")
    return TextFigures(
        mean_token_probability=report.served.mean_token_probability,
        num_near_duplicates=report.served.num_near_duplicates,
    )


def _check_pooled(
    report: GateReport, figures: DraftFigures, prompts: Sequence[PromptCounts]
) -> None:
    """A draft's counts are the sum of its prompts', except served ones that were left out."""
    if not prompts:
        return
    sums = pooled((prompt.counts for prompt in prompts), report.num_draft_tokens).histogram
    whole = report.served is None or not report.num_short_prompts
    for got, summed in zip(figures.histogram, sums, strict=True):
        near = math.isclose(got, summed, rel_tol=ROUNDING, abs_tol=ROUNDING)
        if not near and (whole or got < summed):
            role = "candidate" if figures is report.candidate else "baseline"
            raise _EditedError(f"{role}.histogram: expected {summed:g} by its prompts, got {got:g}")


def _joint(joint: JointReport) -> JointReport:
    served, replayed = (report and _compare(report) for report in (joint.served, joint.replayed))
    again = joint_report(served=served, replayed=replayed, noise=_noise(joint), parity=joint.parity)
    _check(joint, {"verdict": again.verdict, "exit_code": again.exit_code})
    return dataclasses.replace(
        joint,
        reason=again.reason,
        action=again.action,
        warnings=again.warnings,
        served=joint.served and served and _compared(joint.served, served),
        replayed=joint.replayed and replayed and _compared(joint.replayed, replayed),
        noise=again.noise,
    )


def _noise(joint: JointReport) -> ServerNoise | None:
    """The noise, from two changes whose counts no report has."""
    noise = joint.noise
    if noise is None:
        return None
    if joint.served is None:
        raise _EditedError("noise: expected served beside it")
    policy, change, drift = joint.served.policy, noise.change, noise.drift
    for name, read, level in (("change", change, policy.confidence),
                             ("drift", drift, DRIFT_CONFIDENCE)):  # fmt: skip
        if read is not None and read.confidence != level:
            raise _EditedError(f"noise.{name}.confidence: expected {level}, got {read.confidence}")
        if read is not None and not read.lower <= read.log_ratio <= read.upper:
            raise _EditedError(f"noise.{name}: expected lower <= log_ratio <= upper")
    is_apart = change is None and noise.verdict == "ANOMALOUS"
    incomparable = noise.reason.partition(":")[0] if is_apart else ""
    verdict, reason, action = judged_noise(incomparable, change, drift, policy)
    if noise.verdict != verdict:
        raise _EditedError(f"noise.verdict: expected {verdict}, got {noise.verdict}")
    return dataclasses.replace(noise, reason=reason, action=action)


def _check(report: object, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        for where, wanted, got in differences(key, value, getattr(report, key)):
            raise _EditedError(f"{where}: expected {short(wanted)}, got {short(got)}")


FORMAT: Literal["draftquant gate"] = "draftquant gate"
SCHEMA_VERSION: Literal[2] = 2
"""Changes whenever equal counts are judged differently: what is read is judged again."""
_AGAIN = "run the gate again with --report"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """Base by which the decoder tells the kinds apart."""

    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHeader:
    """What comes before a judgement; `argv` is empty from Python, `date` None in older reports."""

    format: Literal["draftquant gate"] = FORMAT
    schema_version: Literal[2] = SCHEMA_VERSION
    draftquant: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    drafts: Drafts
    engines: tuple[EngineFacts, ...]
    asked: str | None = None
    date: str | None = None

    def problem(self) -> str:
        """Why this is not a header; empty if it is."""
        if self.date is None or is_date(self.date):
            return ""
        return f"date: expected YYYY-MM-DDThh:mm:ssZ, got {self.date!r}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Document(Brief):
    """A report of the gate as stored in a file.

    Attributes:
        header: who was judged, by which version and command.
        judgement: the verdict and all its evidence.
    """

    header: ReportHeader
    judgement: Judgement

    @property
    def comparisons(self) -> tuple[tuple[str, GateReport], ...]:
        """Every comparison of two drafts by its title, which is "" for a single one."""
        if isinstance(self.judgement, GateReport):
            return (("", self.judgement),)
        both = (("Replayed", self.judgement.replayed), ("Served", self.judgement.served))
        return tuple((title, report) for title, report in both if report is not None)

    @property
    def of_targets(self) -> bool:
        """Whether one draft was judged beside two targets."""
        return any(report.served and report.served.of_targets for _, report in self.comparisons)

    @property
    def of_one_draft(self) -> bool:
        """Whether one draft was judged beside two targets or on two servers."""
        return any(report.served and report.served.of_one_draft for _, report in self.comparisons)

    @property
    def sides(self) -> SideNames:
        """What is compared."""
        if self.of_targets:
            return OF_TARGETS
        return OF_SERVERS if self.of_one_draft else DRAFTS

    @property
    def names(self) -> tuple[str, str]:
        """Those of baseline and candidate; of one draft those of the targets, or of the runs."""
        drafts = self.header.drafts
        if self.of_one_draft:
            _, report = self.comparisons[-1]
            return report.baseline.name, report.candidate.name
        return drafts.baseline.name, drafts.candidate.name

    @property
    def drafts(self) -> tuple[tuple[str, DraftFacts], ...]:
        """Each draft that was judged, and what it was."""
        baseline, candidate = self.header.drafts.baseline, self.header.drafts.candidate
        two = ((self.sides.first, baseline), (self.sides.second, candidate))
        return ((self.sides.both, baseline),) if self.of_one_draft else two

    @property
    def noise(self) -> ServerNoise | None:
        """The noise of the server; None where it was measured once."""
        return self.judgement.noise if isinstance(self.judgement, JointReport) else None

    @property
    def findings(self) -> tuple[ParityFinding, ...]:
        """The findings of parity checks."""
        return self.judgement.parity if isinstance(self.judgement, JointReport) else ()

    @override
    def brief(self) -> Mapping[str, object]:
        drafts = self.header.drafts
        return {
            "verdict": self.judgement.verdict,
            "draft": drafts.candidate.name,
            "against": drafts.baseline.name,
            "reason": self.judgement.reason,
        }


def document_of(
    judged: Judgement,
    *,
    argv: Sequence[str],
    drafts: Drafts,
    engines: Sequence[EngineFacts],
    asked: str | None = None,
    date: str | None = None,
) -> dict[str, Any]:
    """Plain data for JSON; `argv` has no paths and outputs."""
    header = ReportHeader(
        draftquant=package_version("draftquant"),
        argv=tuple(argv),
        environment=environment(),
        drafts=drafts,
        engines=tuple(engines),
        asked=asked,
        date=date,
    )
    return asdict(header) | judged.to_mapping()


def document_text(document: Mapping[str, Any]) -> str:
    """The text of a report file; numbers are finite."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def read_report(path: Path) -> Document:
    """What `gate --report` wrote; GateError if the file is something else or contradicts itself."""
    try:
        return parse_report(read_text(path), path)
    except OSError as exc:
        raise GateError(path, f"cannot be read: {exc}", fix="give what the gate wrote") from exc


def parse_report(text: str, where: object) -> Document:
    """As `read_report`, for the text of a file."""
    try:
        mapping = parse_object(text)
        _check_version(mapping, where)
        names = {field.name for field in fields(ReportHeader)} & mapping.keys()
        header = {key: mapping.pop(key) for key in names}
        document = Document(header=decode(ReportHeader, header), judgement=_judgement(mapping))
    except JsonProblem as exc:
        raise GateError(where, f"is no report of the gate: {exc}", fix=_AGAIN) from exc
    judgement, problem = judged_again(document.judgement)
    if problem := problem or _identity_problem(document):
        raise GateError(
            where,
            f"says what does not follow from its own counts: {problem}",
            fix=f"{_AGAIN}: this file was edited, or another version judged it",
        )
    return dataclasses.replace(document, judgement=judgement)


def _identity_problem(document: Document) -> str:
    drafts = document.header.drafts
    for _, report in document.comparisons:
        known = report.background
        for role, judged, named in (
            ("candidate", known.candidate_sha256, drafts.candidate.sha256),
            ("baseline", known.baseline_sha256, drafts.baseline.sha256),
        ):
            if judged is not None and named is not None and judged != named:
                return f"drafts.{role}.sha256: a draft with tensors {judged} was judged"
    return ""


def _judgement(mapping: Mapping[str, Any]) -> Judgement:
    try:
        decoded: _Judgement = decode(_Judgement, {"judgement": mapping})
    except JsonProblem as exc:
        raise JsonProblem(str(exc).removeprefix("judgement.")) from exc
    return decoded.judgement


def _check_version(mapping: Mapping[str, Any], where: object) -> None:
    kind, version = mapping.get("format"), mapping.get("schema_version")
    if kind != FORMAT:
        what = f"is no report of the gate: expected format {FORMAT!r}, got {short(kind)}"
        fix = "give what 'draftquant gate --report' wrote"
        if kind == "draftquant parity":
            what, fix = "is a report of parity, not of the gate", f"gate ... --parity {where}"
        raise GateError(where, what, fix=fix)
    if type(version) is int and version != SCHEMA_VERSION:
        raise GateError(
            where,
            "was judged by the rules of another draftquant: expected schema_version"
            f" {SCHEMA_VERSION}, got {version}",
            fix=f"{_AGAIN}, or read it with the draftquant that wrote it",
        )
