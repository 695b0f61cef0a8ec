"""The report of the gate as a JSON document: what its keys are, and one strict reading of it.

docs/report-format.md describes every key. What is written is `document_of` a judgement; what is
read is a `Document`, of which all other forms of the report are made.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from ...calibration.traces.manifest import Sampling, TargetIdentity
from ...quantize.files.provenance import package_version
from ...recipes.errors import short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..categories import CategoryFigures
from ..decision import Verdict
from ..doubts import Background
from ..draft_replay import FirstStepAgreement
from ..errors import GateError
from ..estimand import DraftSampling
from ..gate import DraftFigures, PromptFigures
from ..looks import Look
from ..paired import PairedChange, RequiredPrompts
from ..parity.finding import Finding
from ..policy import Policy
from ..served.noise import ServerNoise
from ..served_figures import ServedFigures
from .checks import comparison_problem, exit_code_problem
from .facts import Drafts, EngineFacts, environment

FORMAT: Literal["draftquant gate"] = "draftquant gate"
SCHEMA_VERSION: Literal[1] = 1
_AGAIN = "run the gate again with --report"
_KEYS_OF_OLD = {"verdict", "reason", "exit_code"}
"""What every report had before reports had a version."""


class Judged(Protocol):
    """What the gate gives, of whatever kind."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFigures:
    """As in `FeatureEvidence`; JSON has the shifts as text."""

    repeats: int
    constant: bool
    share: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """The traces that were replayed; as in `TraceFigures`."""

    sha256: str
    target: TargetIdentity
    temperature: float
    sampling: Sampling | None
    mean_token_probability: float | None
    repeated_8gram_share: float
    num_near_duplicates: int
    features: FeatureFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two drafts; keys as in `GateReport`, and `exit_code` and `relative_change`."""

    kind: Literal["comparison"]
    verdict: Verdict
    reason: str
    action: str | None
    warnings: tuple[str, ...]
    policy: Policy
    looser_than_release: tuple[str, ...]
    look: Look | None
    estimand: str
    convention: str
    num_draft_tokens: int
    draft_sampling: DraftSampling | None
    traces: RecordedText | None
    background: Background
    num_prompts: int
    num_copies: int
    num_short_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    required_num_prompts: RequiredPrompts | None
    first_step: FirstStepAgreement | None
    categories: tuple[CategoryFigures, ...]
    served: ServedFigures | None
    prompts: tuple[PromptFigures, ...]
    num_clusters: int | None = None
    exit_code: int
    relative_change: float | None

    def problem(self) -> str:
        """What no gate says; empty for what one may say."""
        return exit_code_problem(self.verdict, self.exit_code) or comparison_problem(
            num_draft_tokens=self.num_draft_tokens,
            drafts=(self.baseline, self.candidate),
            changes=(self.change, *(each.change for each in self.categories)),
            limits=(
                self.policy.max_relative_drop,
                *(each.max_relative_drop for each in self.categories),
            ),
            prompts=self.prompts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retuned:
    """Both comparisons of a draft that its target taught; keys as in `RetunedReport`."""

    kind: Literal["retuned"]
    mark: str
    rule: str
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    quantization_change: float | None
    training_change: float | None
    quantization_and_training_change: float | None
    against_tuned: Comparison
    against_bf16: Comparison

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of both, each once."""
        both = (*self.against_tuned.warnings, *self.against_bf16.warnings)
        return tuple(dict.fromkeys(both))

    def problem(self) -> str:
        """As of `Comparison`."""
        return exit_code_problem(self.verdict, self.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Several judgements of one candidate; keys as in `JointReport`."""

    kind: Literal["joint"]
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    warnings: tuple[str, ...]
    served: Comparison | None
    replayed: Comparison | Retuned | None
    noise: ServerNoise | None
    parity: tuple[Finding, ...]

    def problem(self) -> str:
        """As of `Comparison`."""
        if self.served is None and self.replayed is None:
            return "served, replayed: expected one of them"
        changes = () if self.noise is None else (self.noise.change, self.noise.drift)
        return exit_code_problem(self.verdict, self.exit_code) or comparison_problem(
            changes=changes
        )


Judgement = Comparison | Retuned | Joint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """So that the kinds are told apart by the decoder."""

    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands before a judgement, in the same object.

    Attributes:
        draftquant: version that wrote the report. argv: see `recorded_argv`.
        environment: package -> version.
        engines: what engines do with the candidate; none where its folder was not at hand.
    """

    format: Literal["draftquant gate"] = FORMAT
    schema_version: Literal[1] = SCHEMA_VERSION
    draftquant: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    drafts: Drafts
    engines: tuple[EngineFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    header: Header
    judgement: Judgement

    @property
    def comparisons(self) -> tuple[tuple[str, Comparison], ...]:
        """Every comparison of two drafts, under its title: "" of a sole one."""
        return tuple(_comparisons(self.judgement, ""))

    @property
    def noise(self) -> ServerNoise | None:
        """Of the server, where it was measured twice."""
        return self.judgement.noise if isinstance(self.judgement, Joint) else None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of checks of parity."""
        return self.judgement.parity if isinstance(self.judgement, Joint) else ()


def _comparisons(judgement: Judgement, title: str) -> Iterator[tuple[str, Comparison]]:
    if isinstance(judgement, Comparison):
        yield title, judgement
    elif isinstance(judgement, Retuned):
        lead = f"{title}, against" if title else "Against"
        yield f"{lead} BF16 taught alike: quantization", judgement.against_tuned
        yield f"{lead} BF16 as released: quantization and training", judgement.against_bf16
    else:
        if judgement.replayed is not None:
            yield from _comparisons(judgement.replayed, "Replayed")
        if judgement.served is not None:
            yield "Served", judgement.served


def document_of(
    judged: Judged,
    *,
    argv: Sequence[str],
    drafts: Drafts,
    engines: Sequence[EngineFacts],
) -> dict[str, Any]:
    """Plain data for JSON.

    Args:
        judged: of the gate.
        argv: of the command, without places and outputs.
        drafts: who was compared.
        engines: what engines do with the candidate.
    """
    header = Header(
        draftquant=package_version("draftquant"),
        argv=tuple(argv),
        environment=environment(),
        drafts=drafts,
        engines=tuple(engines),
    )
    return asdict(header) | judged.to_mapping()


def document_text(document: Mapping[str, Any]) -> str:
    """What a report file holds; numbers are finite."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def read_report(path: Path) -> Document:
    """Read what `gate --report` wrote.

    Raises:
        GateError: it cannot be read, is something else or of another version, or says what no gate
            says.
    """
    try:
        return parse_report(read_text(path), path)
    except OSError as exc:
        raise GateError(path, f"cannot be read: {exc}", fix="give what the gate wrote") from exc


def parse_report(text: str, where: object) -> Document:
    """As `read_report`, of the text of a file.

    Args:
        text: JSON.
        where: for errors.
    """
    try:
        found = parse_object(text)
        _check_version(found, where)
        names = {field.name for field in fields(Header)}
        header = {key: value for key, value in found.items() if key in names}
        rest = {key: value for key, value in found.items() if key not in names}
        return Document(header=decode(Header, header), judgement=_judgement(rest))
    except JsonProblem as exc:
        raise GateError(where, f"is no report of the gate: {exc}", fix=_AGAIN) from exc


def _judgement(mapping: Mapping[str, Any]) -> Judgement:
    try:
        found: _Judgement = decode(_Judgement, {"judgement": mapping})
    except JsonProblem as exc:
        raise JsonProblem(str(exc).removeprefix("judgement.")) from exc
    return found.judgement


def _check_version(found: Mapping[str, Any], where: object) -> None:
    """Say what a file is that has another format or version, before its keys are looked at."""
    kind, version = found.get("format"), found.get("schema_version")
    if kind == "draftquant parity":
        raise GateError(
            where, "is a report of parity, not of the gate", fix=f"gate ... --parity {where}"
        )
    if kind is None and found.keys() >= _KEYS_OF_OLD:
        raise GateError(
            where,
            f"was written by a draftquant before 0.2: expected schema_version {SCHEMA_VERSION},"
            " got none",
            fix=_AGAIN,
        )
    if kind != FORMAT:
        raise GateError(
            where,
            f"is no report of the gate: expected format {FORMAT!r}, got {short(kind)}",
            fix="give what 'draftquant gate --report' wrote",
        )
    if type(version) is int and version > SCHEMA_VERSION:
        raise GateError(
            where,
            f"was written by a newer draftquant: expected schema_version {SCHEMA_VERSION}, got"
            f" {short(version)}",
            fix=f"install a newer draftquant, or {_AGAIN}",
        )
