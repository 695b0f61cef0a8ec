"""What one check of parity found, in the words of the gate; and findings as a JSON file.

{"format": "draftquant parity", "format_version": 1, "findings": [{"check": ...}, ...],
 "drafts_sha256": ["9f2c...", ...]}

is what `parity --report` writes and the gate reads. Files of earlier versions have no drafts.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from ...quantize.files.report_files import write_reports
from ...recipes.bounds import CONFIDENCE
from ...recipes.brief import Brief
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import ParityError
from ..judging.verdict import EXIT_CODES, Verdict, worst

CheckName = Literal["divergence", "task", "sampled", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure against one threshold.

    Attributes:
        check: which kind. what: of what, in words, such as "gsm8k exact_match".
        estimate: the figure, None where there is none. lower, upper: its one-sided bounds at
            `confidence`; None where the figure is a count that needs none.
        threshold: that it is held against; None = none was given, and the verdict INCONCLUSIVE.
        verdict: of this check alone. reason: one sentence.
        details: plain data for the report.
    """

    check: CheckName
    what: str
    estimate: float | None
    lower: float | None = None
    upper: float | None = None
    confidence: float | None = None
    threshold: float | None
    verdict: Verdict
    reason: str
    details: tuple[Mapping[str, object], ...] = ()

    def problem(self) -> str:
        """What no check of ours says; empty for what one may say."""
        if self.verdict in ("PASS", "FAIL") and self.threshold is None:
            return f"verdict {self.verdict} without a threshold"
        if (self.lower is None) != (self.confidence is None):
            return "bounds and their confidence stand together, or neither does"
        if (self.lower is None) != (self.upper is None):
            return "one bound without the other"
        problem = CONFIDENCE.problem(self.confidence)
        return f"confidence: {problem}" if problem else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FindingsFile:
    format: Literal["draftquant parity"] = "draftquant parity"
    format_version: Literal[1] = 1
    findings: tuple[Finding, ...]
    drafts_sha256: tuple[str | None, ...] = ()

    def problem(self) -> str:
        """A report without a finding would pass whatever it is asked."""
        return "" if self.findings else "findings: expected at least one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A report that was read.

    Attributes:
        findings: at least one.
        drafts_sha256: identity of the tensors of each draft that was looked at, None where it is
            not known; empty = nothing says which.
    """

    path: Path
    findings: tuple[Finding, ...]
    drafts_sha256: tuple[str | None, ...]


def to_mapping(
    findings: Sequence[Finding], drafts_sha256: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(
        _FindingsFile(findings=tuple(findings), drafts_sha256=tuple(drafts_sha256))
    )


def write_findings(
    path: Path,
    findings: Sequence[Finding],
    *,
    drafts_sha256: Sequence[str | None] = (),
    overwrite: bool = False,
) -> None:
    """Write a report.

    Args:
        findings: at least one.
        drafts_sha256: see `ParityReport`.

    Raises:
        OutputError: it cannot be written, or exists.
    """
    text = json.dumps(to_mapping(findings, drafts_sha256), indent=2, allow_nan=False) + "\n"
    write_reports({path: text}, overwrite=overwrite)


def read_parity(path: Path) -> ParityReport:
    """Read what `write_findings` wrote.

    Raises:
        ParityError: it is no such file, or says what no check says.
    """
    try:
        report: _FindingsFile = decode(_FindingsFile, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise ParityError(
            path,
            f"is not a report of 'draftquant parity': {exc}",
            fix="give what 'draftquant parity' --report wrote",
        ) from exc
    return ParityReport(path=path, findings=report.findings, drafts_sha256=report.drafts_sha256)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Findings(Brief):
    """All findings of one parity check, at least one.

    Attributes:
        findings: the findings, each with an estimate, its bounds, a threshold and a verdict.
    """

    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings."""
        return worst([found.verdict for found in self.findings])

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS."""
        return EXIT_CODES[self.verdict]

    @override
    def brief(self) -> Mapping[str, object]:
        first = min(self.findings, key=lambda one: one.verdict != self.verdict)
        return {
            "verdict": self.verdict,
            "findings": len(self.findings),
            "of": f"{first.check}: {first.what}",
            "reason": first.reason,
        }
