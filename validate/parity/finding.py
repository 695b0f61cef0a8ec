"""What one check of parity found, in the words of the gate; and findings as a JSON file.

A figure passes if both its bounds are within the limits, fails if a limit lies beyond both, and is
INCONCLUSIVE otherwise, also without a limit, or with too few prompts.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from ...quantize.files.report_files import write_reports
from ...recipes.brief import Brief, apart, counted
from ...recipes.decode import CONFIDENCE
from ...recipes.errors import ParityError
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..judging.policy import EXIT_CODES, Verdict, worst

if TYPE_CHECKING:
    from ..counting.paired_change import Bounded

CheckName = Literal["divergence", "task", "sampled", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityFinding:
    """One figure compared with a threshold; without a threshold the verdict is INCONCLUSIVE.

    Attributes:
        what: in words, such as "gsm8k exact_match".
        lower, upper: one-sided bounds at `confidence`; None where the figure is a count.
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
        """What none of our checks writes; empty if there is nothing."""
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
    findings: tuple[ParityFinding, ...]
    drafts_sha256: tuple[str | None, ...] = ()  # files of earlier versions have none

    def problem(self) -> str:
        """A report without a finding would pass any check."""
        return "" if self.findings else "findings: expected at least one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """A report that was read, with the sha256 of the tensors of each draft; empty = not known."""

    path: Path
    findings: tuple[ParityFinding, ...]
    drafts_sha256: tuple[str | None, ...]


def to_mapping(
    findings: Sequence[ParityFinding], drafts_sha256: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Plain data for JSON."""
    return dataclasses.asdict(
        _FindingsFile(findings=tuple(findings), drafts_sha256=tuple(drafts_sha256))
    )


def write_findings(
    path: Path,
    findings: Sequence[ParityFinding],
    *,
    drafts_sha256: Sequence[str | None],
    overwrite: bool = False,
) -> None:
    """Write a report of at least one finding; OutputError: it exists, or cannot be written."""
    text = json.dumps(to_mapping(findings, drafts_sha256), indent=2, allow_nan=False) + "\n"
    write_reports({path: text}, overwrite=overwrite)


def read_parity(path: Path) -> ParityReport:
    """What `write_findings` wrote; ParityError if the file is another, or no check writes it."""
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

    findings: tuple[ParityFinding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings."""
        return worst([finding.verdict for finding in self.findings])

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS."""
        return EXIT_CODES[self.verdict]

    @override
    def brief(self) -> Mapping[str, object]:
        first = min(self.findings, key=lambda finding: finding.verdict != self.verdict)
        return {
            "verdict": self.verdict,
            "findings": len(self.findings),
            "of": f"{first.check}: {first.what}",
            "reason": first.reason,
        }


MIN_PROMPTS = 30
"""Distinct prompts, as `release` requires; with fewer, a few odd ones make bounds too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Allowed values of a figure, in its own unit: inclusive, None = any; from `option`."""

    option: str
    least: float | None = None
    most: float | None = None

    @property
    def given(self) -> list[float]:
        """Those that are set."""
        return [limit for limit in (self.least, self.most) if limit is not None]


def limits(
    option: str,
    value: float | None,
    *,
    of: tuple[float, float] = (0, math.inf),
    least: float | None = None,
    most: float | None = None,
) -> Limits:
    """Limits of one option, none if it is not given; ParityError if it is outside the range `of`.

    `least` and `most` are the signs of the limits below and above, in units of `value`.
    """
    if value is None:
        return Limits(option=option)
    if not of[0] <= value <= of[1] or math.isinf(value):
        wanted = f"at least {of[0]:g}" if math.isinf(of[1]) else f"from {of[0]:g} to {of[1]:g}"
        raise ParityError(
            option,
            f"expected a number {wanted}, got {value}",
            fix="1 % is written 0.01",
        )
    lowest, highest = (None if sign is None else sign * value for sign in (least, most))
    return Limits(option=option, least=lowest, most=highest)


def judged(
    check: CheckName,
    what: str,
    bounded: "Bounded",
    allowed: Limits,
    *,
    unit: str = "prompt",
    remedy: str = "measure more prompts",
    details: Sequence[Mapping[str, object]] = (),
) -> ParityFinding:
    """A finding about one figure; `unit` is what a cluster is, `remedy` what would settle it."""
    verdict, why = _verdict(bounded, allowed, unit, remedy)
    spread = bounded.has_spread
    given = allowed.given
    estimate, lower, upper = (
        apart(value, min(given, key=lambda limit: abs(limit - value), default=None), ".4g")
        for value in (bounded.estimate, bounded.lower, bounded.upper)
    )
    bounds = f", bounds {lower} and {upper}" if spread else ""
    return ParityFinding(
        check=check,
        what=what,
        estimate=bounded.estimate,
        lower=bounded.lower if spread else None,
        upper=bounded.upper if spread else None,
        confidence=bounded.confidence if spread else None,
        threshold=given[0] if given else None,
        verdict=verdict,
        reason=f"{estimate}{bounds}, over {counted(bounded.num_clusters, unit)}: {why}.",
        details=tuple(details),
    )


def _verdict(bounded: "Bounded", allowed: Limits, unit: str, remedy: str) -> tuple[Verdict, str]:
    given = allowed.given
    if not given:
        return "INCONCLUSIVE", f"no threshold was given ({allowed.option})"
    if bounded.num_clusters < MIN_PROMPTS:
        return "INCONCLUSIVE", f"expected at least {counted(MIN_PROMPTS, unit)}"
    least = -math.inf if allowed.least is None else allowed.least
    most = math.inf if allowed.most is None else allowed.most
    named = " and ".join(f"{limit:.4g}" for limit in given)
    if least <= bounded.lower and bounded.upper <= most:
        return "PASS", f"its bounds clear the limit {named} ({allowed.option})"
    if bounded.upper < least or most < bounded.lower:
        return "FAIL", f"both bounds are beyond the limit {named} ({allowed.option})"
    return (
        "INCONCLUSIVE",
        f"the limit {named} ({allowed.option}) lies between the bounds, so these items do not"
        f" decide: {remedy}",
    )


@dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """What quantizing may change; None = not judged.

    Attributes:
        max_kl: mean KL(BF16 || quantized).
        min_agreement: share of equal most likely tokens.
        min_top_agreement: shared part of the most likely tokens.
        min_overlap: mean sum of the smaller probabilities.
        max_right_drop: how much less often the most likely token is the target's, as a share.
        max_perplexity_rise: rise of the logarithm of the draft's perplexity on the target's tokens,
            in nats; for small values, the relative rise.
        max_alpha_drop: of the expected acceptance of drawn proposals, as a share.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    min_top_agreement: float | None = None
    min_overlap: float | None = None
    max_right_drop: float | None = None
    max_perplexity_rise: float | None = None
    max_alpha_drop: float | None = None
