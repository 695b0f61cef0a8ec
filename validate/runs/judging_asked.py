"""What is asked of the verbs that judge: records whose fields are their options."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from typing_extensions import override

from ...calibration.passes import OnTraces, Passes
from ...quantize.files.hub import Reference
from ...quantize.files.report_files import ReportFormat, check_reports
from ...recipes.errors import CompareError, DraftQuantError, GateError, GoldenError, OutputError
from ...recipes.formats import KvCacheChoice, OnlineHead, ServedForm, served_form
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ...recipes.schema import PolicyName
from ..judging.policy import Spending
from ..judging.published import Inconclusive

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable with the file that GitHub Actions shows as Markdown on a run's page."""


@dataclass(frozen=True, kw_only=True)
class ReportFiles(Heard):
    """Report files to write for a judgement, for people and for CI."""

    html: AnyPath | None = None
    markdown: AnyPath | None = None
    junit: AnyPath | None = None
    junit_inconclusive: Inconclusive = "error"
    github: bool = False
    golden: AnyPath | None = None
    profile: AnyPath | None = None
    overwrite: bool = False

    @property
    def acceptance(self) -> dict[ReportFormat, Path]:
        """What the candidate accepts: its counts, and the figures that follow."""
        return given({"golden": self.golden, "profile": self.profile})

    @property
    def pages(self) -> dict[ReportFormat, Path]:
        """All forms except JSON."""
        return given({"html": self.html, "markdown": self.markdown, "junit": self.junit})

    @property
    def files(self) -> dict[ReportFormat, Path]:
        """All files."""
        return {**self.acceptance, **self.pages}

    @override
    def check(self) -> None:
        check_reports(self.files, overwrite=self.overwrite)
        if self.github and not os.environ.get(SUMMARY):
            raise OutputError(
                "--github",
                f"expected a step of GitHub Actions, got no ${SUMMARY}",
                fix="leave it out, or give --markdown F.md",
            )

    @property
    def wants_pages(self) -> bool:
        """Whether the report is written in any form besides JSON."""
        return self.github or bool(self.pages) or bool(self.acceptance)


def given(files: Mapping[ReportFormat, AnyPath | None]) -> dict[ReportFormat, Path]:
    """The requested report files."""
    return {kind: Path(path) for kind, path in files.items() if path is not None}


def _refuse_idle(asked: Passes, error: type[DraftQuantError], fix: str) -> None:
    """Refuse options that mean nothing without traces, and have no default."""
    for name in ("num_draft_tokens", "target", "batch_size", "head_online", "ray"):
        if getattr(asked, name, None) is not None:
            what = "is of use for traces only, and none are given"
            raise error(f"--{name.replace('_', '-')}", what, fix=fix)


_NAMES = ["BF16", "QUANT", "--traces"]
_OF_DRAFTS = (
    "unrelated", "unrecorded", "head_online", "kv_cache_dtype", "target", "measured",
    "baseline_again", "parity", "golden", "profile",
)  # fmt: skip
"""Options of a gate on two drafts, that say nothing of one draft beside two targets."""


class _ServedOtherwise(Passes):
    """Runs whose drafts an engine may round while it loads, and that a cluster may compute."""

    head_online: OnlineHead | None
    kv_cache_dtype: KvCacheChoice
    ray: str | None

    @property
    def ray_address(self) -> str | None:
        """Address of the Ray cluster that computes what drafts propose."""
        return self.ray

    @property
    @override
    def served(self) -> ServedForm:
        return served_form(self.head_online, self.kv_cache_dtype)


@dataclass(frozen=True)
class GateRun(_ServedOtherwise, OnTraces, ReportFiles):
    """Which drafts are judged, by what, and by which rule."""

    baseline: Reference | None = None
    candidate: Reference | None = None
    traces: AnyPath | None = None
    _: KW_ONLY
    traces_of_candidate: AnyPath | None = None
    unrelated: bool = False
    expect_baseline: float | None = None
    head_online: OnlineHead | None = None
    kv_cache_dtype: KvCacheChoice = "auto"
    ray: str | None = None
    measured: Sequence[AnyPath] | None = None
    baseline_again: AnyPath | None = None
    parity: Sequence[AnyPath] = ()
    asked: AnyPath | None = None
    policy: PolicyName = "release"
    max_relative_drop: float | None = None
    confidence: float | None = None
    min_prompts: int | None = None
    every_category_passes: bool = False
    unrecorded: bool = False
    look: str | None = None
    spending: Spending | None = None
    report: AnyPath | None = None

    @override
    def check(self) -> None:
        if self.asked is not None and self.candidate is None:
            raise GateError("--asked", "is about QUANT, and there is none", fix="add BF16 QUANT")
        if self.traces_of_candidate is not None:
            self._check_beside_targets()
            return super().check()
        places = zip(_NAMES, (self.baseline, self.candidate, self.traces), strict=True)
        missing = [name for name, value in places if value is None]
        measured_alone = self.measured is not None and missing in (_NAMES, _NAMES[2:])
        if missing and not measured_alone:
            absent = f"add {' '.join(missing).replace('--traces', '--traces T')}"
            raise GateError(
                "gate",
                f"expected BF16 QUANT --traces T, got no {', '.join(missing)}",
                fix=f"{absent} (draftquant record writes T); for servers: --measured A B, with"
                " BF16 and QUANT or without",
            )
        if self.baseline_again and not self.measured:
            raise GateError(
                "--baseline-again",
                "expected --measured A B beside it",
                fix="add the two measurements",
            )
        if missing:
            _refuse_idle(self, GateError, "leave it out, or give BF16 QUANT --traces T too")
        return super().check()

    def _check_beside_targets(self) -> None:
        """One draft, both traces, and no option of a second draft."""
        if self.baseline is None or self.traces is None:
            raise GateError(
                "--traces-of-candidate",
                "expected DRAFT --traces T beside it: one draft, and traces of the same prompts"
                " beside both targets",
                fix="gate DRAFT --traces T --traces-of-candidate T2",
            )
        if self.candidate is not None:
            raise GateError(
                "QUANT",
                "expected one draft with --traces-of-candidate, got two: a draft is compared with"
                " itself beside two targets",
                fix="leave out the second draft; to judge a quantized draft, leave out"
                " --traces-of-candidate",
            )
        for name in _OF_DRAFTS:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                option = f"--{name.replace('_', '-')}"
                raise GateError(
                    option,
                    "says nothing of one draft beside two targets (--traces-of-candidate)",
                    fix="leave it out; tables come from the traces (record --tables)",
                )

    @property
    @override
    def files(self) -> dict[ReportFormat, Path]:
        return {**given({"report": self.report}), **super().files}

    @property
    def references(self) -> list[Reference]:
        """Baseline and candidate, as far as they were given; one draft beside two targets twice."""
        if self.traces_of_candidate is not None and self.baseline is not None:
            return [self.baseline, self.baseline]
        return [name for name in (self.baseline, self.candidate) if name is not None]


@dataclass(frozen=True)
class ReplayRun(_ServedOtherwise, OnTraces):
    """Which drafts are replayed along which traces."""

    drafts: Sequence[Reference]
    traces: AnyPath
    _: KW_ONLY
    rope_theta: float | None = None
    head_online: OnlineHead | None = None
    kv_cache_dtype: KvCacheChoice = "auto"
    ray: str | None = None
    golden: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        if self.golden is not None and len(self.drafts) != 1:
            fix = "replay the draft alone; its BF16 draft is not needed"
            raise GoldenError("--golden", f"is of one draft, got {len(self.drafts)}", fix=fix)
        check_reports(given({"golden": self.golden}), overwrite=self.overwrite)

    @property
    @override
    def rotary_base(self) -> float | None:
        return self.rope_theta


@dataclass(frozen=True)
class CompareRun(OnTraces):
    """Which drafts are compared on which prompts."""

    drafts: Sequence[Reference]
    traces: AnyPath | None = None
    _: KW_ONLY
    traffic: Mapping[str, float] | None = None
    confidence: float = 0.95
    html: AnyPath | None = None
    plot: AnyPath | None = None
    report: AnyPath | None = None
    overwrite: bool = False

    @property
    def files(self) -> dict[ReportFormat, Path]:
        """The files to write."""
        return given({"html": self.html, "plot": self.plot, "report": self.report})

    @override
    def check(self) -> None:
        check_reports(self.files, overwrite=self.overwrite)
        if self.traces is None:
            _refuse_idle(self, CompareError, "leave it out, or give drafts and --traces T")


@dataclass(frozen=True)
class ReportRun(ReportFiles):
    """Which report of the gate to write again, in which forms."""

    gate: AnyPath
