"""Settings of the verbs of `parity`; fields are their options."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ...calibration.passes import ComputeDtype
from ...calibration.prompts.prompt_forms import ChosenPrompts
from ...quantize.files.hub import Reference
from ...quantize.files.report_files import check_reports
from ...recipes.errors import ParityError
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ..parity.finding import DraftLimits, Findings, ParityFinding, write_findings

ScoringEngine = Literal["vllm", "sglang"]


@dataclass(frozen=True, kw_only=True)
class FindingsFile(Heard):
    """Where findings are written to, for the gate."""

    report: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        if self.report is not None:
            check_reports({"report": Path(self.report)}, overwrite=self.overwrite)

    def written(
        self,
        findings: Sequence[ParityFinding],
        drafts_sha256: Callable[[], Sequence[str | None]] = tuple,
    ) -> Findings:
        """At least one finding, written to a file if requested, with the drafts it is about."""
        if self.report is not None:
            write_findings(
                Path(self.report), findings, drafts_sha256=drafts_sha256(), overwrite=self.overwrite
            )
        return Findings(findings=tuple(findings))


@dataclass(frozen=True, kw_only=True)
class BoundedFindings(FindingsFile):
    """Settings of figures that have bounds."""

    confidence: float = 0.95


@dataclass(frozen=True)
class DivergenceRun(FindingsFile):
    """Which measurements, and what counts as noise."""

    plain: AnyPath
    speculative: Sequence[AnyPath]
    _: KW_ONLY
    plain_again: AnyPath | None = None
    max_gap: float | None = None
    max_hazard_ratio: float | None = None
    min_prompts: int | None = None


@dataclass(frozen=True)
class DraftParityRun(BoundedFindings, DraftLimits):
    """Which drafts along which traces, and how far they may differ."""

    baseline: Reference
    candidate: Reference
    traces: AnyPath
    _: KW_ONLY
    num_draft_tokens: int | None = None
    target: AnyPath | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    top: int = 5


@dataclass(frozen=True)
class SampledRun(BoundedFindings, ChosenPrompts):
    """Which measurements, and who scores their likelihood."""

    plain: AnyPath
    speculative: AnyPath
    prompts: AnyPath
    _: KW_ONLY
    tokenizer: AnyPath | None = None
    target: AnyPath | None = None
    score_server: str | None = None
    score_engine: ScoringEngine | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    concurrency: int = 8
    max_logprob_drop: float | None = None

    @override
    def check(self) -> None:
        super().check()
        if (self.target is None) == (self.score_server is None):
            raise ParityError(
                "--target",
                "expected one who scores: --target or --score-server",
                fix="give --target M, or --score-server URL",
            )


@dataclass(frozen=True)
class TasksRun(BoundedFindings):
    """Which samples, and which drop is too much."""

    first: AnyPath
    second: AnyPath
    _: KW_ONLY
    max_score_drop: float | None = None
    higher_is_better: Sequence[str] = ()
    lower_is_better: Sequence[str] = ()
