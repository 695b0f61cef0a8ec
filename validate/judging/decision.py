"""From evidence to a verdict: a ladder of rules; the first one that applies decides.

PASS          the lower bound of the change clears the margin, and no part of it fails
FAIL          the upper bound lies beyond the margin, or that of a part beyond its own
INCONCLUSIVE  neither, or too few prompts to say, of all or of a part that lost much
ANOMALOUS     the figures do not come from a working pair of drafts on the same text, or nothing
              says how the candidate was made

Parts are categories of prompts and context bins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...calibration.traces.trace_info import MIN_AGREEMENT
from ...recipes.brief import apart
from ...recipes.packages import said, table_beside
from ..counting.draft_counts import DraftCounts
from ..counting.paired_change import PairedChange, RequiredPrompts, required_prompts
from .advice import (
    Evidence,
    calibrate_on,
    findings,
    fresh_prompts,
    kinds_of,
    lines,
    lose_less,
    more_prompts,
    names,
    number_of,
)
from .categories import outcome
from .policy import Policy, Verdict, in_percent, worst

EXPECTED_WITHIN = 0.05
"""Relative difference up to which `--expect-baseline` confirms a measured acceptance length."""
_ENOUGH_FOR_RARE_LOSSES = 100
"""Prompts at which a loss in one prompt in twenty passes in 5 % of cases; with 36 it is 9 %."""
_OF_TARGETS = table_beside(__file__, "of_targets")
_USUAL_WEIGHTS = 0.9
"""Effective sample size by the number of prompts, where these are of similar length."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with its reason; fields as in `GateReport`: `action` has one way out per line."""

    verdict: Verdict
    reason: str
    action: str | None = None
    required_num_prompts: RequiredPrompts | None = None


def decide(evidence: Evidence) -> Decision:
    """The first rung that applies."""
    return next(found for rung in LADDER if (found := rung(evidence)))


def worse(one: Decision, other: Decision) -> Decision:
    """The decision with the worse verdict, else the first."""
    return one if worst((one.verdict, other.verdict)) == one.verdict else other


def _decided(
    evidence: Evidence,
    row: str,
    *ways: str,
    required: RequiredPrompts | None = None,
    **facts: object,
) -> Decision:
    """The verdict and the words of a row of decision.toml; ways out where the row has none.

    Where targets are compared, those of of_targets.toml, as far as it has the row.
    """
    own = evidence.wording.of_targets and row in _OF_TARGETS
    texts: dict[str, Any] = said(__file__, "of_targets" if own else "decision", row, facts)
    return Decision(**{"action": lines(*ways), **texts}, required_num_prompts=required)


def _different_things(evidence: Evidence) -> Decision | None:
    if not (what := evidence.incomparable):
        return None
    what = f"{what[0].upper()}{what[1:]}"
    return _decided(evidence, "different_things", evidence.wording.both_again, what=what)


def _another_target(evidence: Evidence) -> Decision | None:
    agreement = evidence.background.head_agreement
    if agreement is None or agreement >= MIN_AGREEMENT:
        return None
    told = apart(agreement, MIN_AGREEMENT, ".1%")
    return _decided(evidence, "another_target", agreement=told, least=MIN_AGREEMENT)


def _calibrated_elsewhere(evidence: Evidence) -> Decision | None:
    targets = evidence.background.other_target
    return _decided(evidence, "calibrated_elsewhere", targets=targets) if targets else None


def _impossible_length(evidence: Evidence, role: str) -> Decision | None:
    draft = evidence.baseline if role == "baseline" else evidence.candidate
    length, most = draft.counts.mean_acceptance_length, draft.num_draft_tokens + 1
    ceiling = evidence.policy.max_ceiling_share * most
    if length < evidence.policy.min_acceptance_length:
        return _decided(evidence, "nothing_accepted", role=role, length=length)
    if length > ceiling:
        told = apart(length, ceiling, ".4f")
        return _decided(
            evidence, "at_the_ceiling", role=role, length=told, most=most, ceiling=ceiling
        )
    return None


def _doubtful_baseline(evidence: Evidence) -> Decision | None:
    """A known acceptance length settles it; otherwise features and length must look right."""
    baseline, expected = evidence.baseline, evidence.background.expected_baseline
    length = baseline.counts.mean_acceptance_length
    if expected is not None:
        if abs(length / expected - 1) <= EXPECTED_WITHIN:
            return None
        within = EXPECTED_WITHIN
        return _decided(
            evidence, "unexpected_baseline", length=length, expected=expected, within=within
        )
    fault = baseline.text.fault
    if fault is not None:
        return _decided(evidence, "features_of_other_text", fault=f"{fault[0].upper()}{fault[1:]}")
    floor = min_baseline_length(baseline, evidence.policy)
    if length < floor:
        told, k = apart(length, floor, ".4f"), baseline.num_draft_tokens
        return _decided(evidence, "short_baseline", length=told, k=k, floor=floor)
    return None


def min_baseline_length(baseline: DraftCounts, policy: Policy) -> float:
    """Mean acceptance length below which a baseline is doubted: 1 + a + a^2 + ... + a^K.

    Drawn text is harder to guess: a draft that proposes its most likely token is right at best as
    often as that token is drawn, which is at least the mean probability of the drawn tokens. So a
    is multiplied by that. (Drawn proposals lose less, as far as measured: 2.00 where this gives
    1.15, on the shipped EAGLE-3 pair at temperature 0.8 and top-p 0.95.)
    """
    a = policy.min_step_acceptance * (baseline.text.mean_token_probability or 1.0)
    return sum(a**j for j in range(baseline.num_draft_tokens + 1))


def _no_spread(evidence: Evidence) -> Decision | None:
    """Prompts are never all alike: a bound without width is one prompt in disguise.

    Except where nothing changed: one more step of one token and one of three, for two of two, is
    """
    change = evidence.change
    if change is None or change.has_spread or not change.log_ratio:
        return None
    return _decided(evidence, "no_spread", change=change)


def _too_few_prompts(evidence: Evidence) -> Decision | None:
    policy, change, count = evidence.policy, evidence.change, len(evidence.prompts)
    if change is None:
        number = f"{2 * policy.min_prompts} fresh prompts or more"
        ways = fresh_prompts(number, evidence.wording)
        return _decided(evidence, "hardly_any_prompts", ways, count=count, policy=policy)
    effective = change.effective_num_prompts
    if effective >= policy.min_prompts:
        return None
    unequal = effective < _USUAL_WEIGHTS * count
    weight = ", because a few of them hold most verify steps" if unequal else ""
    least = change.num_prompts_for(policy.min_prompts)
    told = apart(effective, policy.min_prompts, ".1f")
    return _undecided("too_few_prompts", evidence, change, least, effective=told, weight=weight)


def _too_large_a_gain(evidence: Evidence) -> Decision | None:
    change, largest = evidence.change, math.log1p(evidence.policy.max_relative_gain)
    if change is None or change.log_ratio <= largest or evidence.background.unrelated:
        return None
    return _decided(evidence, "too_large_a_gain", change=change)


def _a_part_fails(evidence: Evidence) -> Decision | None:
    failing, change = evidence.parts.with_outcome("FAIL"), evidence.change
    if change is None or not failing:
        return None
    return _decided(
        evidence,
        "a_part_fails",
        calibrate_on(failing),
        *lose_less(evidence.background),
        confidence=in_percent(change.confidence),
        parts=number_of(failing),
        limit=evidence.policy.max_category_drop,
        findings=findings(failing),
    )


def _beyond_the_limit(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "FAIL":
        return None
    failing = evidence.parts.with_outcome("FAIL")
    also = f" Categories beyond their own limit: {names(failing)}." if failing else ""
    ways, confidence = lose_less(evidence.background), in_percent(change.confidence)
    return _decided(
        evidence,
        "beyond_the_limit",
        *ways,
        limit=limit,
        confidence=confidence,
        whole=whole_change(change, limit),
        also=also,
    )


def _without_a_record(evidence: Evidence) -> Decision | None:
    if not (evidence.policy.record_required and evidence.background.unrecorded):
        return None
    return _decided(evidence, "without_a_record")


def _limit_between_the_bounds(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "INCONCLUSIVE":
        return None
    return _undecided(
        "limit_between_the_bounds", evidence, change, whole=whole_change(change, limit)
    )


def _a_part_is_open(evidence: Evidence) -> Decision | None:
    unsettled = evidence.parts.with_outcome("INCONCLUSIVE")
    if not evidence.policy.every_category_passes or not unsettled:
        return None
    return _decided(
        evidence,
        "a_part_is_open",
        fresh_prompts(f"fresh prompts, with more of {names(unsettled)}", evidence.wording),
        kinds=kinds_of(evidence.parts.all),
        limit=evidence.policy.max_category_drop,
        findings=findings(unsettled),
    )


def _a_small_part_lost(evidence: Evidence) -> Decision | None:
    lost = [found for found in evidence.parts.all if found.certainly_lost]
    if not lost:
        return None
    policy, least = evidence.policy, evidence.policy.min_category_prompts
    few = f"{least} prompts{' in effect' if any(one.is_context_bin for one in lost) else ''}"
    few += ", or without the declared clusters," if evidence.declared else ""
    return _decided(
        evidence,
        "a_small_part_lost",
        fresh_prompts(f"fresh prompts, with at least {least} of {names(lost)}", evidence.wording),
        calibrate_on(lost),
        *lose_less(evidence.background),
        parts=number_of(lost),
        few=few,
        limit=policy.max_category_drop,
        findings=findings(lost),
    )


def _not_all_compared(evidence: Evidence) -> Decision | None:
    """Less evidence makes no verdict easier: what was not compared might be an anomaly."""
    missing = evidence.background.not_compared
    if not missing:
        return None
    ways = evidence.background.to_compare
    return _decided(evidence, "not_all_compared", *ways, missing="; ".join(missing))


def _passed(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    assert change is not None  # too few prompts is an earlier rung
    rare, effective = "", change.effective_num_prompts
    if min(len(evidence.prompts), effective / _USUAL_WEIGHTS) < _ENOUGH_FOR_RARE_LOSSES:
        rare = (
            f", but {evidence.counted} (effective sample size {effective:.1f}) do not exclude a"
            " loss that is confined to few prompts"
        )
    confidence, whole = in_percent(change.confidence), whole_change(change, limit)
    found = _decided(evidence, "passed", confidence=confidence, limit=limit, rare=rare, whole=whole)
    return replace(found, action=None)


LADDER: tuple[Callable[[Evidence], Decision | None], ...] = (
    _different_things,
    _another_target,
    _calibrated_elsewhere,
    partial(_impossible_length, role="baseline"),
    _doubtful_baseline,
    partial(_impossible_length, role="candidate"),
    _no_spread,
    _too_few_prompts,
    _too_large_a_gain,
    _beyond_the_limit,
    _a_part_fails,
    _without_a_record,
    _limit_between_the_bounds,
    _a_small_part_lost,
    _a_part_is_open,
    _not_all_compared,
    _passed,
)


def _undecided(
    row: str, evidence: Evidence, change: PairedChange, least: int | None = None, **facts: object
) -> Decision:
    policy = evidence.policy
    required = required_prompts(
        change,
        max_relative_drop=evidence.policy.max_relative_drop,
        power=evidence.policy.power,
        min_prompts=evidence.policy.min_prompts,
    )
    ways, facts = more_prompts(evidence, required, least), facts | {"counted": evidence.counted}
    return _decided(evidence, row, ways, required=required, policy=policy, change=change, **facts)


def whole_change(change: PairedChange, limit: float) -> str:
    """A change and its bounds in words, told from the limit."""
    by, lower, upper = change.in_percent(limit)
    return (
        f"the mean acceptance length changed by {by} (one-sided"
        f" {in_percent(change.confidence)} bounds {lower} and {upper})"
    )
