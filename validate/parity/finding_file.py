"""Findings as a JSON file: what `parity --report` writes and the gate reads.

{"format": "draftquant parity", "format_version": 1, "findings": [{"check": ...}, ...]}
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...quantize.files.report_files import write_reports
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import ParityError
from .finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class _FindingsFile:
    format: Literal["draftquant parity"] = "draftquant parity"
    format_version: Literal[1] = 1
    findings: tuple[Finding, ...]

    def problem(self) -> str:
        """A report without a finding would pass whatever it is asked."""
        return "" if self.findings else "findings: expected at least one"


def to_mapping(findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(_FindingsFile(findings=tuple(findings)))


def write_findings(path: Path, findings: Sequence[Finding], *, overwrite: bool = False) -> None:
    """Write a report.

    Args:
        path: file to create.
        findings: at least one.
        overwrite: a file that exists is replaced.

    Raises:
        OutputError: it cannot be written, or exists.
    """
    text = json.dumps(to_mapping(findings), indent=2, allow_nan=False) + "\n"
    write_reports({path: text}, overwrite=overwrite)


def read_findings(path: Path) -> tuple[Finding, ...]:
    """Read what `write_findings` wrote.

    Returns:
        At least one finding.

    Raises:
        ParityError: it is no such file, or says what no check says.
    """
    try:
        report: _FindingsFile = decode(_FindingsFile, parse_object(read_text(path)))
    except (OSError, JsonProblem) as exc:
        raise ParityError(
            path,
            f"is no report of parity: {exc}",
            fix="give what 'draftquant parity' --report wrote",
        ) from exc
    return report.findings
