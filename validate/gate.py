"""The gate: may this quantized draft replace its baseline? One verdict, with its reason.

PASS          the lower bound of the change clears the margin
FAIL          the upper bound lies beyond the margin
INCONCLUSIVE  neither, or too few prompts to say
ANOMALOUS     the figures are not those of a working pair of drafts on the same traces
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .evidence import NO_EVIDENCE, Doubt, Evidence, check_expected_baseline, find_doubt
from .policy import Policy
from .replay import DraftReplay, FirstStepAgreement, PromptReplay, TraceFigures
from .statistics import PairedChange, paired_change, pooled, required_num_prompts

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}

ESTIMAND = "greedy speculative decoding of recorded traces, rounds with a fully known outcome"
CONVENTION = "accepted draft tokens + 1 bonus token per verify step, pooled; prefill not counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """What was measured of one draft; fields as in `AcceptanceCounts`."""

    name: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_steps: int
    num_emitted_tokens: int
    histogram: tuple[int, ...]
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    every_position_mean_acceptance_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryFigures:
    """One category of prompts; `change` is None for fewer than two prompts. Reported, not gated."""

    category: str
    num_prompts: int
    baseline_mean_acceptance_length: float
    candidate_mean_acceptance_length: float
    change: PairedChange | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """The verdict and everything that it rests on.

    Attributes:
        reason: one sentence. action: what to do about it, None for PASS.
        warnings: what a reader has to know beside the verdict, a sentence each.
        change: None where the two replays cannot be compared.
        required_num_prompts: for INCONCLUSIVE, prompts with which this change would pass with the
            policy's power; None where more prompts would not help or none are needed.
        num_prompts: prompts with at least one round. num_short_prompts: those left out for being
            too short.
    """

    verdict: Verdict
    reason: str
    action: str | None
    warnings: tuple[str, ...]
    policy: Policy
    estimand: str
    convention: str
    num_draft_tokens: int
    traces: TraceFigures
    evidence: Evidence
    num_prompts: int
    num_short_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    required_num_prompts: int | None
    first_step: FirstStepAgreement
    categories: tuple[CategoryFigures, ...]

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS."""
        return EXIT_CODES[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON, finite numbers only, with `exit_code` and `relative_change`."""
        relative = self.change.relative_change if self.change else None
        return dataclasses.asdict(self) | {"exit_code": self.exit_code, "relative_change": relative}


@dataclass(frozen=True, slots=True)
class _Decision:
    verdict: Verdict
    reason: str
    action: str | None = None
    required_num_prompts: int | None = None


def judge(
    baseline: DraftReplay,
    candidate: DraftReplay,
    policy: Policy,
    *,
    evidence: Evidence = NO_EVIDENCE,
) -> GateReport:
    """Compare two replays of the same traces.

    Args:
        baseline: the draft as released (BF16).
        candidate: the quantized draft, replayed in the same call after the baseline.
        policy: the limits.
        evidence: what was looked at before; its warnings come first in the report.

    Raises:
        GateError: the acceptance length expected of the baseline is none.
    """
    check_expected_baseline(evidence.expected_baseline, baseline.num_draft_tokens)
    mismatch = _mismatch(baseline, candidate)
    pairs = [] if mismatch else _pairs(baseline, candidate)
    change = _change(pairs, policy)
    decision = mismatch or _doubted(find_doubt(baseline, candidate, policy, evidence))
    if decision is None:
        decision = _by_change(change, policy, len(pairs), evidence)
    return GateReport(
        verdict=decision.verdict,
        reason=decision.reason,
        action=decision.action,
        warnings=evidence.warnings,
        policy=policy,
        estimand=ESTIMAND,
        convention=CONVENTION,
        num_draft_tokens=baseline.num_draft_tokens,
        traces=baseline.traces,
        evidence=evidence,
        num_prompts=len(pairs),
        num_short_prompts=len(baseline.prompts) - len(pairs),
        baseline=draft_figures(baseline),
        candidate=draft_figures(candidate),
        change=change,
        required_num_prompts=decision.required_num_prompts,
        first_step=candidate.first_step,
        categories=_categories(pairs, policy),
    )


def draft_figures(replay: DraftReplay) -> DraftFigures:
    """The figures of one replayed draft, pooled over its prompts."""
    counts = replay.counts
    return DraftFigures(
        name=replay.name,
        mean_acceptance_length=counts.mean_acceptance_length,
        draft_acceptance_rate=counts.draft_acceptance_rate,
        num_steps=counts.num_steps,
        num_emitted_tokens=counts.num_emitted_tokens,
        histogram=counts.histogram,
        survival=counts.survival,
        conditional=counts.conditional,
        every_position_mean_acceptance_length=replay.every_position.mean_acceptance_length,
    )


_Pair = tuple[PromptReplay, PromptReplay]


def _pairs(baseline: DraftReplay, candidate: DraftReplay) -> list[_Pair]:
    """The prompts that have at least one round; a prompt has one for all drafts or for none."""
    both = zip(baseline.prompts, candidate.prompts, strict=True)
    return [(b, q) for b, q in both if b.counts.num_steps and q.counts.num_steps]


def _change(pairs: Sequence[_Pair], policy: Policy) -> PairedChange | None:
    if len(pairs) < 2:
        return None
    return paired_change(
        [b.counts for b, _ in pairs],
        [q.counts for _, q in pairs],
        confidence=policy.confidence,
    )


def _mismatch(baseline: DraftReplay, candidate: DraftReplay) -> _Decision | None:
    """Replays of different things are not compared."""
    what = ""
    if baseline.traces.sha256 != candidate.traces.sha256:
        what = "the two drafts were replayed on different traces"
    elif baseline.num_draft_tokens != candidate.num_draft_tokens:
        what = (
            f"the two drafts drafted {baseline.num_draft_tokens} and"
            f" {candidate.num_draft_tokens} tokens per step"
        )
    elif [p.id for p in baseline.prompts] != [p.id for p in candidate.prompts]:
        what = "the two drafts were replayed on different prompts"
    if not what:
        return None
    return _Decision(
        "ANOMALOUS",
        f"{what[0].upper()}{what[1:]}: no comparison is possible.",
        "Replay both drafts in one run, with one K.",
    )


def _doubted(doubt: Doubt | None) -> _Decision | None:
    return _Decision("ANOMALOUS", doubt.reason, doubt.action) if doubt else None


def _by_change(
    change: PairedChange | None, policy: Policy, num_prompts: int, evidence: Evidence
) -> _Decision:
    if change is None or num_prompts < policy.min_prompts:
        required = max(policy.min_prompts, (change and _required(change, policy)) or 0)
        return _Decision(
            "INCONCLUSIVE",
            f"{num_prompts} prompts are fewer than the {policy.min_prompts} that the policy"
            f" {policy.name!r} asks for.",
            f"Record traces of at least {required} prompts.",
            required,
        )
    if change.log_ratio > math.log1p(policy.max_relative_gain) and not evidence.unrelated:
        return _Decision(
            "ANOMALOUS",
            f"The candidate accepts {change.relative_change:+.2%} more than its baseline: rounding"
            " does not do that.",
            "Check that the baseline is the draft that was quantized, and that all of it loads.",
        )
    return _by_bounds(change, policy)


def _by_bounds(change: PairedChange, policy: Policy) -> _Decision:
    limit = math.log1p(-policy.max_relative_drop)
    finding = (
        f"The mean acceptance length changed by {change.relative_change:+.2%}, one-sided"
        f" {change.confidence:.0%} bounds {math.expm1(change.lower):+.2%} and"
        f" {math.expm1(change.upper):+.2%}, limit {-policy.max_relative_drop:+.2%}"
    )
    if change.lower > limit:
        return _Decision("PASS", f"{finding}: the lower bound clears the limit.")
    if change.upper < limit:
        return _Decision(
            "FAIL",
            f"{finding}: even the upper bound is beyond the limit.",
            "Use a wider format or a better algorithm, or keep the most sensitive linears in BF16.",
        )
    required = _required(change, policy)
    action = (
        "The measured change is itself beyond the limit: improve the draft before measuring on."
    )
    if required is not None:
        action = f"Record traces of about {required} prompts."
    return _Decision(
        "INCONCLUSIVE", f"{finding}: the limit lies between the bounds.", action, required
    )


def _required(change: PairedChange, policy: Policy) -> int | None:
    return required_num_prompts(
        change, max_relative_drop=policy.max_relative_drop, power=policy.power
    )


def _categories(pairs: Sequence[_Pair], policy: Policy) -> tuple[CategoryFigures, ...]:
    found = []
    for category in sorted({b.category for b, _ in pairs}):
        own = [pair for pair in pairs if pair[0].category == category]
        num_draft_tokens = own[0][0].counts.num_draft_tokens
        counts = [pooled((pair[i].counts for pair in own), num_draft_tokens) for i in (0, 1)]
        found.append(
            CategoryFigures(
                category=category,
                num_prompts=len(own),
                baseline_mean_acceptance_length=counts[0].mean_acceptance_length,
                candidate_mean_acceptance_length=counts[1].mean_acceptance_length,
                change=_change(own, policy),
            )
        )
    return tuple(found)
