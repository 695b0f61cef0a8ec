"""From evidence to a verdict: a ladder of rules, of which the first that applies decides.

PASS          the lower bound of the change clears the margin, and no part of it fails
FAIL          the upper bound lies beyond the margin, or that of a part beyond its own
INCONCLUSIVE  neither, or too few prompts to say, of all or of a part that lost much
ANOMALOUS     the figures are not those of a working pair of drafts on the same text, or nothing
              says how the candidate was made

Parts are categories of prompts and context bins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..counting.draft_counts import DraftCounts, PromptPair
from ..counting.paired_change import PairedChange, RequiredPrompts, required_prompts
from .advice import (
    Background,
    calibrate_on,
    find_anomaly,
    findings,
    fresh_prompts,
    kinds_of,
    lines,
    lose_less,
    more_prompts,
    names,
    number_of,
)
from .categories import Parts, outcome
from .policy import Look, Policy, Verdict, Wording, in_percent

_ENOUGH_FOR_RARE_LOSSES = 100
"""Prompts of which a loss in one prompt in twenty passes in 5 % of cases; in 9 % of 36."""
_USUAL_WEIGHTS = 0.9
"""Effective sample size by the number of prompts, where these are of similar length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a verdict rests on; `incomparable` says why there can be none, "" = there can."""

    baseline: DraftCounts
    candidate: DraftCounts
    incomparable: str
    prompts: tuple[PromptPair, ...]
    change: PairedChange | None
    parts: Parts
    policy: Policy
    look: Look | None
    background: Background
    wording: Wording

    @property
    def declared(self) -> bool:
        """Whether clusters were declared that texts do not show."""
        return any(prompt.cluster != prompt.alike for prompt in self.baseline.prompts)

    @property
    def counted(self) -> str:
        """How many prompts there are, in words."""
        clustered = any(prompt.cluster for prompt in self.baseline.prompts)
        unit = "clusters of prompts" if clustered else "distinct prompts"
        return f"{len(self.prompts)} {unit}"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with its reason; fields as in `GateReport`: one way out a line of `action`."""

    verdict: Verdict
    reason: str
    action: str | None = None
    required_num_prompts: RequiredPrompts | None = None


def decide(evidence: Evidence) -> Decision:
    """The first rung that applies."""
    return next(found for rung in LADDER if (found := rung(evidence)))


def accepted_the_same(evidence: Evidence) -> bool:
    """Whether every prompt has the same counts under both drafts."""
    return all(pair.baseline == pair.candidate for pair in evidence.prompts)


def _different_things(evidence: Evidence) -> Decision | None:
    what = evidence.incomparable
    if not what:
        return None
    return Decision(
        "ANOMALOUS",
        f"{what[0].upper()}{what[1:]}: no comparison is possible.",
        evidence.wording.both_again,
    )


def _anomalous(evidence: Evidence) -> Decision | None:
    found = find_anomaly(
        evidence.baseline, evidence.candidate, evidence.policy, evidence.background
    )
    return Decision("ANOMALOUS", found.reason, found.action) if found else None


def _no_spread(evidence: Evidence) -> Decision | None:
    """Prompts are never all alike: a bound without width is one prompt in disguise.

    Unless nothing changed: a step more of one token and of three, for two of two, is no change.
    """
    change = evidence.change
    if change is None or change.has_spread or not change.log_ratio:
        return None
    return Decision(
        "ANOMALOUS",
        f"Each of the {change.num_prompts} prompts changed by the same"
        f" {change.relative_change:+.2%}. Different prompts never do that.",
        "Compare the prompts: they are probably copies of each other.",
    )


def _too_few_prompts(evidence: Evidence) -> Decision | None:
    policy, change, count = evidence.policy, evidence.change, len(evidence.prompts)
    needs = f"the policy {policy.name!r} needs an effective sample size of {policy.min_prompts}"
    if change is None:
        number = f"{2 * policy.min_prompts} fresh prompts or more"
        return Decision(
            "INCONCLUSIVE",
            f"There are too few prompts, {count}: {needs}.",
            fresh_prompts(number, evidence.wording),
        )
    effective = change.effective_num_prompts
    if effective >= policy.min_prompts:
        return None
    unequal = effective < _USUAL_WEIGHTS * count
    weight = ", because a few of them hold most verify steps" if unequal else ""
    return _undecided(
        evidence,
        change,
        f"There are too few prompts: {evidence.counted} have an effective sample size of"
        f" {effective:.1f}{weight}, and {needs}.",
        least=change.num_prompts_for(policy.min_prompts),
    )


def _too_large_a_gain(evidence: Evidence) -> Decision | None:
    change, largest = evidence.change, math.log1p(evidence.policy.max_relative_gain)
    if change is None or change.log_ratio <= largest or evidence.background.unrelated:
        return None
    return Decision(
        "ANOMALOUS",
        f"The candidate's acceptance length is {change.relative_change:+.2%} above its baseline's."
        " Rounding cannot do that.",
        "Check that the baseline is the draft that was quantized, and that all of it loads.",
    )


def _a_part_fails(evidence: Evidence) -> Decision | None:
    failing = [found for found in evidence.parts.all if found.outcome == "FAIL"]
    if not failing:
        return None
    return Decision(
        "FAIL",
        f"With {_sure(evidence)} confidence {number_of(failing)} lost more than the limit of"
        f" {_categories_limit(evidence)}: {findings(failing)}.",
        lines(calibrate_on(failing), *lose_less(evidence.background)),
    )


def _beyond_the_limit(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "FAIL":
        return None
    failing = [found for found in evidence.parts.all if found.outcome == "FAIL"]
    also = f" Categories beyond their own limit: {names(failing)}." if failing else ""
    return Decision(
        "FAIL",
        f"With {in_percent(change.confidence)} confidence the drop is larger than the limit of"
        f" {limit:.2%}: {_whole(change)}.{also}",
        lines(*lose_less(evidence.background)),
    )


def _without_a_record(evidence: Evidence) -> Decision | None:
    if not (evidence.policy.record_required and evidence.background.unrecorded):
        return None
    return Decision(
        "ANOMALOUS",
        "The candidate's folder has no record (draftquant.json) of how it was quantized. So nothing"
        " shows that these prompts did not calibrate it, and a draft is judged too well on prompts"
        " that calibrated it.",
        lines(
            "Give the folder as draftquant wrote it, with its draftquant.json.",
            "If another tool made it, and you know that none of these prompts calibrated it, add"
            " --unrecorded.",
        ),
    )


def _limit_between_the_bounds(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "INCONCLUSIVE":
        return None
    return _undecided(
        evidence,
        change,
        f"These prompts do not decide whether the drop is larger than the limit of {limit:.2%}:"
        f" {_whole(change)}.",
    )


def _a_part_is_open(evidence: Evidence) -> Decision | None:
    if not evidence.policy.every_category_passes:
        return None
    unsettled = [found for found in evidence.parts.all if found.outcome == "INCONCLUSIVE"]
    if not unsettled:
        return None
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole, but every {kinds_of(evidence.parts.all)} has to pass, and"
        f" these prompts do not decide whether a drop is larger than {_categories_limit(evidence)}:"
        f" {findings(unsettled)}.",
        fresh_prompts(f"fresh prompts, with more of {names(unsettled)}", evidence.wording),
    )


def _a_small_part_lost(evidence: Evidence) -> Decision | None:
    lost = [found for found in evidence.parts.all if found.certainly_lost]
    if not lost:
        return None
    least = evidence.policy.min_category_prompts
    few = f"{least} prompts{' in effect' if any(one.is_context_bin for one in lost) else ''}"
    few += ", or without the declared clusters," if evidence.declared else ""
    number = f"fresh prompts, with at least {least} of {names(lost)}"
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole, but {number_of(lost)} with fewer than {few} lost more than"
        f" {_categories_limit(evidence)}, more than chance explains among so many small parts:"
        f" {findings(lost)}.",
        lines(
            fresh_prompts(number, evidence.wording),
            calibrate_on(lost),
            *lose_less(evidence.background),
        ),
    )


def _not_all_compared(evidence: Evidence) -> Decision | None:
    """Less evidence makes no verdict easier: what was not compared might be an anomaly."""
    missing = evidence.background.not_compared
    if not missing:
        return None
    return Decision(
        "INCONCLUSIVE",
        "The bounds clear the limit, but these files do not show that the two runs can be compared."
        f" Not compared: {'; '.join(missing)}.",
        lines(*evidence.background.to_compare),
    )


def _passed(evidence: Evidence) -> Decision | None:
    change = evidence.change
    assert change is not None  # too few prompts is a rung above
    rare, effective = "", change.effective_num_prompts
    if min(len(evidence.prompts), effective / _USUAL_WEIGHTS) < _ENOUGH_FOR_RARE_LOSSES:
        rare = (
            f", but {evidence.counted} (effective sample size {effective:.1f}) do not exclude a"
            " loss that is confined to few prompts"
        )
    return Decision(
        "PASS",
        f"With {in_percent(change.confidence)} confidence the drop is smaller than the limit of"
        f" {evidence.policy.max_relative_drop:.2%}{rare}: {_whole(change)}.",
    )


LADDER: tuple[Callable[[Evidence], Decision | None], ...] = (
    _different_things,
    _anomalous,
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
    evidence: Evidence, change: PairedChange, reason: str, *, least: int | None = None
) -> Decision:
    required = required_prompts(
        change,
        max_relative_drop=evidence.policy.max_relative_drop,
        power=evidence.policy.power,
        min_prompts=evidence.policy.min_prompts,
    )
    action = more_prompts(
        required,
        least=least,
        policy=evidence.policy,
        look=evidence.look,
        background=evidence.background,
        wording=evidence.wording,
    )
    return Decision("INCONCLUSIVE", reason, action, required)


def _whole(change: PairedChange) -> str:
    lower, upper = change.relative_bounds
    return (
        f"the mean acceptance length changed by {change.relative_change:+.2%} (one-sided"
        f" {in_percent(change.confidence)} bounds {lower:+.2%} and {upper:+.2%})"
    )


def _sure(evidence: Evidence) -> str:
    assert evidence.change is not None  # there are parts
    return in_percent(evidence.change.confidence)


def _categories_limit(evidence: Evidence) -> str:
    return f"{evidence.policy.max_category_drop:.2%}"
