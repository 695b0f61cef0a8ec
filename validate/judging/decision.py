"""From evidence to a verdict: a ladder of rules, of which the first that applies decides.

PASS          the lower bound of the change clears the margin, and no category fails
FAIL          the upper bound lies beyond the margin, or that of a category beyond its own
INCONCLUSIVE  neither, or too few prompts to say, of all or of a category that lost much
ANOMALOUS     the figures are not those of a working pair of drafts on the same text, or nothing
              says how the candidate was made
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..counting.draft_counts import DraftCounts, PromptPair
from ..counting.paired_change import PairedChange, RequiredPrompts, required_prompts
from .anomalies import Background, find_anomaly
from .categories import CategoryFigures, outcome
from .interim_analysis import Look
from .policy import Policy
from .verdict import Verdict, Wording, in_percent

MOST_PROMPTS = 10_000
"""Nobody records more, so that no larger number is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a verdict rests on.

    Attributes:
        incomparable: in what the two differ so that they cannot be compared, a sentence without a
            full stop; empty if in nothing.
        prompts: distinct, with at least one round under both drafts; none if they cannot be
            compared. change: over them, None for fewer than two.
        wording: of the way in which the drafts were counted.
    """

    baseline: DraftCounts
    candidate: DraftCounts
    incomparable: str
    prompts: tuple[PromptPair, ...]
    change: PairedChange | None
    categories: tuple[CategoryFigures, ...]
    policy: Policy
    look: Look | None
    background: Background
    wording: Wording


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

    Unless nothing changed: a round more of one token and of three, for two of two, is no change.
    """
    change = evidence.change
    if change is None or change.has_spread or not change.log_ratio:
        return None
    return Decision(
        "ANOMALOUS",
        f"The drafts differ by {change.relative_change:+.2%}, and in each of the"
        f" {change.num_prompts} prompts by the same: different prompts do not do that.",
        "Look into the prompts: they are copies of each other in some disguise.",
    )


def _too_few_prompts(evidence: Evidence) -> Decision | None:
    policy, change, count = evidence.policy, evidence.change, len(evidence.prompts)
    if change is None:
        return Decision(
            "INCONCLUSIVE",
            f"{count} distinct prompts are fewer than the {policy.min_prompts} that the policy"
            f" {policy.name!r} asks for.",
            f"{evidence.wording.take} a fresh set of {2 * policy.min_prompts} prompts or more: a"
            f" smaller one may have an effective sample size below {policy.min_prompts}.",
        )
    effective = change.effective_num_prompts
    if effective >= policy.min_prompts:
        return None
    in_effect = ""
    if count >= policy.min_prompts:
        in_effect = f", in effect {effective:.1f} (a few of them hold most verify steps),"
    clustered = any(prompt.cluster for prompt in evidence.baseline.prompts)
    unit = "clusters of prompts" if clustered else "distinct prompts"
    required = _required(evidence, change, policy.max_relative_drop)
    return Decision(
        "INCONCLUSIVE",
        f"{count} {unit}{in_effect} are fewer than the {policy.min_prompts} that the"
        f" policy {policy.name!r} asks for.",
        _advice(evidence, required),
        required,
    )


def _too_large_a_gain(evidence: Evidence) -> Decision | None:
    change, largest = evidence.change, math.log1p(evidence.policy.max_relative_gain)
    background = evidence.background
    if change is None or change.log_ratio <= largest or background.unrelated or background.taught:
        return None
    return Decision(
        "ANOMALOUS",
        f"The candidate accepts {change.relative_change:+.2%} more than its baseline: rounding"
        " does not do that.",
        "Check that the baseline is the draft that was quantized, and that all of it loads.",
    )


def _a_category_fails(evidence: Evidence) -> Decision | None:
    failing = [found for found in evidence.categories if found.outcome == "FAIL"]
    if not failing:
        return None
    named = "; ".join(_finding(found) for found in failing)
    return Decision(
        "FAIL",
        f"A category lost too much, even by its upper bound: {named}.",
        _lines("Calibrate on prompts of that category too.", *_improve(evidence)),
    )


def _beyond_the_limit(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "FAIL":
        return None
    failing = [repr(found.category) for found in evidence.categories if found.outcome == "FAIL"]
    also = f" Of the categories these lost too much too: {', '.join(failing)}." if failing else ""
    return Decision(
        "FAIL",
        f"{_whole(change, limit)}: even the upper bound is beyond the limit.{also}",
        _lines(*_improve(evidence)),
    )


def _without_a_record(evidence: Evidence) -> Decision | None:
    if not (evidence.policy.record_required and evidence.background.unrecorded):
        return None
    return Decision(
        "ANOMALOUS",
        "The candidate's folder has no record (draftquant.json) of how it was quantized: nothing"
        " says that these prompts did not calibrate it, and then it would be judged too well.",
        _lines(
            "Give the folder as draftquant wrote it, with its draftquant.json.",
            "If another tool made it and you know that none of these prompts calibrated it, say so"
            " with --unrecorded.",
        ),
    )


def _limit_between_the_bounds(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "INCONCLUSIVE":
        return None
    required = _required(evidence, change, limit)
    return Decision(
        "INCONCLUSIVE",
        f"{_whole(change, limit)}: the limit lies between the bounds.",
        _advice(evidence, required),
        required,
    )


def _a_category_is_open(evidence: Evidence) -> Decision | None:
    if not evidence.policy.every_category_passes:
        return None
    unsettled = [found for found in evidence.categories if found.outcome == "INCONCLUSIVE"]
    if not unsettled:
        return None
    named = "; ".join(_finding(found) for found in unsettled)
    return Decision(
        "INCONCLUSIVE",
        f"The whole clears its limit, but every category has to pass: {named}.",
        f"{evidence.wording.take} a fresh set with more prompts of:"
        f" {', '.join(found.category for found in unsettled)}.",
    )


def _a_small_category_lost(evidence: Evidence) -> Decision | None:
    lost = [found for found in evidence.categories if found.certainly_lost]
    if not lost:
        return None
    named = "; ".join(_finding(found) for found in lost)
    least = evidence.policy.min_category_prompts
    return Decision(
        "INCONCLUSIVE",
        f"The whole clears its limit, but a category of fewer than {least} prompts lost too much,"
        f" even by an upper bound that allows for the number of such categories: {named}.",
        _lines(
            f"{evidence.wording.take} a fresh set with at least {least} prompts of:"
            f" {', '.join(found.category for found in lost)}.",
            "Calibrate on prompts of that category too.",
            *_improve(evidence),
        ),
    )


def _passed(evidence: Evidence) -> Decision | None:
    assert evidence.change is not None  # too few prompts is a rung above
    finding = _whole(evidence.change, evidence.policy.max_relative_drop)
    return Decision("PASS", f"{finding}: the lower bound clears the limit.")


LADDER: tuple[Callable[[Evidence], Decision | None], ...] = (
    _different_things,
    _anomalous,
    _no_spread,
    _too_few_prompts,
    _too_large_a_gain,
    _beyond_the_limit,
    _a_category_fails,
    _without_a_record,
    _limit_between_the_bounds,
    _a_small_category_lost,
    _a_category_is_open,
    _passed,
)


def _whole(change: PairedChange, max_relative_drop: float) -> str:
    lower, upper = change.relative_bounds
    return (
        f"The mean acceptance length changed by {change.relative_change:+.2%}, one-sided"
        f" {in_percent(change.confidence)} bounds {lower:+.2%} and {upper:+.2%}, limit"
        f" {-max_relative_drop:+.2%}"
    )


def _finding(found: CategoryFigures) -> str:
    assert found.change is not None  # it has an outcome, or would have
    lower, upper = found.change.relative_bounds
    return (
        f"{found.category!r} ({found.num_prompts} prompts) {found.change.relative_change:+.2%},"
        f" bounds {lower:+.2%} and {upper:+.2%}, limit {-found.max_relative_drop:+.2%}"
    )


def _required(
    evidence: Evidence, change: PairedChange, max_relative_drop: float
) -> RequiredPrompts:
    return required_prompts(
        change,
        max_relative_drop=max_relative_drop,
        power=evidence.policy.power,
        min_prompts=evidence.policy.min_prompts,
    )


def _improve(evidence: Evidence) -> tuple[str, ...]:
    """How the candidate may lose less."""
    algorithm = evidence.background.algorithm_to_try
    better = (f"Quantize it with '--algorithm {algorithm}' and calibration traces.",)
    return (
        *(better if algorithm else ()),
        "Use a wider format.",
        "Keep the most sensitive linears in BF16 ('draftquant tune' finds them).",
    )


def _advice(evidence: Evidence, required: RequiredPrompts) -> str:
    look, take = evidence.look, evidence.wording.take
    if look is not None and not look.is_last:
        following = f"--look {look.number + 1}/{look.total}"
        return f"Go on as planned: add as many prompts as at each look, and give {following}."
    if required.as_measured is None:
        return _lines(
            "More prompts will most likely not help: the measured change is itself beyond the"
            " limit.",
            *_improve(evidence),
        )
    if required.as_measured > MOST_PROMPTS:
        return _lines(
            "More prompts will hardly help: the measured change is so near the limit that more than"
            f" {MOST_PROMPTS:,} would be needed.",
            *_improve(evidence),
        )
    assert required.fewest is not None  # of a smaller loss than the measured one
    if required.most is None or required.most > MOST_PROMPTS:
        number = f"{required.fewest:,} or more"
    elif required.fewest == required.most:
        number = f"{required.fewest:,}"
    else:
        number = f"{required.fewest:,} to {required.most:,}"
    return (
        f"{take} a fresh set of {number} prompts ({required.if_unchanged:,} if the draft in truth"
        " lost nothing). Judge it alone and once: each further try, on fresh prompts or on these"
        f" and more, adds up to {100 * (1 - evidence.policy.confidence):.2g}% false passes (--look"
        " i/n plans looks that do not)."
    )


def _lines(*ways: str) -> str:
    """Ways out, one a line."""
    return "\n".join(ways)
