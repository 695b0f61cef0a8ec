"""The report of the gate as a JSON document: what its keys are, and one strict reading of it.

docs/report-format.md describes every key. What is written is `document_of` a judgement; what is
read is a `Document`, of which all other forms are made, once its counts were judged again.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from ...quantize.files.package_version import package_version
from ...recipes.brief import Brief
from ...recipes.errors import short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import GateError
from ..judging.judgement import GateReport
from ..parity.finding import Finding
from ..served.joint_report import JointReport
from ..served.server_noise import ServerNoise
from .facts import Drafts, EngineFacts, environment, is_date
from .judged_again import Judgement, judged_again

FORMAT: Literal["draftquant gate"] = "draftquant gate"
SCHEMA_VERSION: Literal[2] = 2
"""Another one wherever equal counts are judged differently: what is read is judged again."""
_AGAIN = "run the gate again with --report"
_KEYS_OF_OLD = {"verdict", "reason", "exit_code"}
"""What every report had before reports had a version."""
_JUDGED_NOTHING = {"confidence_head"}
"""Keys of reports of 0.2.0 that no verdict followed from, whatever they say."""
_LEFT: Mapping[str, object] = {"tuned": None, "taught": False}
"""Others -> the value that says nothing; with another one they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """So that the kinds are told apart by the decoder."""

    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands before a judgement, in the same object.

    Attributes:
        draftquant: version that wrote the report. argv: see `recorded_argv`; none from Python.
        date: UTC when the gate began, see `facts.today`; None in reports of before.
        environment: package -> version.
        engines: what engines do with the candidate; none where its folder was not at hand.
    """

    format: Literal["draftquant gate"] = FORMAT
    schema_version: Literal[2] = SCHEMA_VERSION
    draftquant: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    drafts: Drafts
    engines: tuple[EngineFacts, ...]
    date: str | None = None

    def problem(self) -> str:
        """What is no header; empty if nothing."""
        if self.date is None or is_date(self.date):
            return ""
        return f"date: expected YYYY-MM-DDThh:mm:ssZ, got {self.date!r}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Document(Brief):
    """A report of the gate as it stands in a file.

    Attributes:
        header: who was judged, by which version and command.
        judgement: the verdict and all its evidence.
    """

    header: Header
    judgement: Judgement

    @property
    def comparisons(self) -> tuple[tuple[str, GateReport], ...]:
        """Every comparison of two drafts, under its title: "" of a sole one."""
        return tuple(_comparisons(self.judgement, ""))

    @property
    def noise(self) -> ServerNoise | None:
        """The noise of the server; None where it was measured once."""
        return self.judgement.noise if isinstance(self.judgement, JointReport) else None

    @property
    def findings(self) -> tuple[Finding, ...]:
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


def _comparisons(judgement: Judgement, title: str) -> Iterator[tuple[str, GateReport]]:
    if isinstance(judgement, GateReport):
        yield title, judgement
    else:
        if judgement.replayed is not None:
            yield from _comparisons(judgement.replayed, "Replayed")
        if judgement.served is not None:
            yield "Served", judgement.served


def document_of(
    judged: Judgement,
    *,
    argv: Sequence[str],
    drafts: Drafts,
    engines: Sequence[EngineFacts],
    date: str | None = None,
) -> dict[str, Any]:
    """Plain data for JSON.

    Args:
        argv: of the command, without places and outputs.
        date: see `Header`.
    """
    header = Header(
        draftquant=package_version("draftquant"),
        argv=tuple(argv),
        environment=environment(),
        drafts=drafts,
        engines=tuple(engines),
        date=date,
    )
    return asdict(header) | judged.to_mapping()


def document_text(document: Mapping[str, Any]) -> str:
    """What a report file holds; numbers are finite."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def read_report(path: Path) -> Document:
    """Read what `gate --report` wrote.

    Raises:
        GateError: it cannot be read, is something else or of another version, or contradicts its
            own counts.
    """
    try:
        return parse_report(read_text(path), path)
    except OSError as exc:
        raise GateError(path, f"cannot be read: {exc}", fix="give what the gate wrote") from exc


def parse_report(text: str, where: object) -> Document:
    """As `read_report`, of the text of a file.
    """
    try:
        found = parse_object(text)
        _check_version(found, where)
        found = _without_what_left(found, where)
        names = {field.name for field in fields(Header)}
        header = {key: value for key, value in found.items() if key in names}
        rest = {key: value for key, value in found.items() if key not in names}
        document = Document(header=decode(Header, header), judgement=_judgement(rest))
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
    """Whether the drafts that are named are those that were judged; empty if they may be."""
    drafts = document.header.drafts
    for _, found in document.comparisons:
        known = found.background
        for role, judged, named in (
            ("candidate", known.candidate_sha256, drafts.candidate.sha256),
            ("baseline", known.baseline_sha256, drafts.baseline.sha256),
        ):
            if judged is not None and named is not None and judged != named:
                return f"drafts.{role}.sha256: a draft with tensors {judged} was judged"
    return ""


def _judgement(mapping: Mapping[str, Any]) -> Judgement:
    try:
        found: _Judgement = decode(_Judgement, {"judgement": mapping})
    except JsonProblem as exc:
        raise JsonProblem(str(exc).removeprefix("judgement.")) from exc
    return found.judgement


def _without_what_left(found: Mapping[str, Any], where: object) -> dict[str, Any]:
    """A report without the keys of 0.2.0 that no verdict follows from.

    Raises:
        GateError: it has a judgement that this version does not know.
    """
    replayed = found.get("replayed")
    for one in (found, replayed if isinstance(replayed, dict) else {}):
        if one.get("kind") == "retuned":
            raise GateError(
                where,
                "judges a draft that was fine-tuned (retune), which draftquant 0.2.0 was the last"
                " to read",
                fix="use draftquant 0.2.0 with this report",
            )
    return _without_empty(found)


def _without_empty(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
        if key not in _JUDGED_NOTHING and (key not in _LEFT or value is not _LEFT[key])
    }


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
    if type(version) is int and 0 < version < SCHEMA_VERSION:
        raise GateError(
            where,
            f"was written by an earlier draftquant, whose gate judged by other rules: expected"
            f" schema_version {SCHEMA_VERSION}, got {version}",
            fix=_AGAIN,
        )
    if type(version) is int and version > SCHEMA_VERSION:
        raise GateError(
            where,
            f"was written by a newer draftquant: expected schema_version {SCHEMA_VERSION}, got"
            f" {short(version)}",
            fix=f"install a newer draftquant, or {_AGAIN}",
        )
