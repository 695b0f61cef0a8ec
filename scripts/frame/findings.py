"""What the verbs of `parity` share: their report file, and what they return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.report_files import check_reports
from ...recipes.decode import CONFIDENCE
from ...recipes.regular_file import AnyPath
from . import reports
from .arguments import Overwrite, share
from .pages import given
from .settings import Option, Settings

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding


@dataclass(frozen=True, kw_only=True)
class FindingsFile(Settings):
    """Where findings are written to, for the gate."""

    report: Annotated[
        AnyPath | None,
        Option("also write the findings to this file, for 'gate --parity'", "F.json"),
    ] = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """The file can be written, which is known before any work."""
        check_reports(given({"report": self.report}), overwrite=self.overwrite)

    def write(
        self,
        findings: "Sequence[Finding]",
        drafts_sha256: Callable[[], Sequence[str | None]] = tuple,
    ) -> "reports.Findings":
        """The findings of a verb, written where that is asked for.

        Args:
            findings: at least one.
            drafts_sha256: asked for a file: see `ParityReport`.
        """
        from ...validate.parity.finding import Findings, write_findings

        if self.report is not None:
            write_findings(
                Path(self.report),
                findings,
                drafts_sha256=drafts_sha256(),
                overwrite=self.overwrite,
            )
        return Findings(findings=tuple(findings))


@dataclass(frozen=True, kw_only=True)
class BoundedFindings(FindingsFile):
    """Of figures that have bounds."""

    confidence: Annotated[
        float,
        Option(
            "confidence of each one-sided bound (default 0.95)",
            "SHARE",
            reads=share,
            bounds=CONFIDENCE,
            fix="write 95 % as 0.95",
        ),
    ] = 0.95
