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
from functools import partial

from ...calibration.traces.trace_info import MIN_AGREEMENT
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
from .policy import Policy, Verdict, in_percent

EXPECTED_WITHIN = 0.05
"""Relative difference up to which `--expect-baseline` confirms a measured acceptance length."""
_ENOUGH_FOR_RARE_LOSSES = 100
"""Prompts of which a loss in one prompt in twenty passes in 5 % of cases; in 9 % of 36."""
_USUAL_WEIGHTS = 0.9
"""Effective sample size by the number of prompts, where these are of similar length."""


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


def _different_things(evidence: Evidence) -> Decision | None:
    what = evidence.incomparable
    if not what:
        return None
    return Decision(
        "ANOMALOUS",
        f"{what[0].upper()}{what[1:]}: no comparison is possible.",
        evidence.wording.both_again,
    )


def _another_target(evidence: Evidence) -> Decision | None:
    agreement = evidence.background.head_agreement
    if agreement is None or agreement >= MIN_AGREEMENT:
        return None
    return Decision(
        "ANOMALOUS",
        f"The target's head reproduces only {agreement:.1%} of the recorded tokens from the"
        f" recorded features of its last layer, expected at least {MIN_AGREEMENT:.0%}. The traces"
        " were recorded from another target, or their features do not belong to their tokens.",
        "Record the traces again, and give the same target to --target.",
    )


def _impossible_length(evidence: Evidence, role: str) -> Decision | None:
    draft = evidence.baseline if role == "baseline" else evidence.candidate
    length, most = draft.counts.mean_acceptance_length, draft.num_draft_tokens + 1
    ceiling = evidence.policy.max_ceiling_share * most
    if length < evidence.policy.min_acceptance_length:
        return Decision(
            "ANOMALOUS",
            f"Almost no token of the {role} is accepted (mean acceptance length {length:.4f}). A"
            " loss of precision does not do that; the draft was probably loaded wrongly.",
            "Check target layers, rope, tensor names and scales with draftquant inspect and"
            " draftquant verify.",
        )
    if length > ceiling:
        return Decision(
            "ANOMALOUS",
            f"The mean acceptance length of the {role}, {length:.4f}, is too close to the maximum"
            f" of {most} (a working draft stays below {ceiling:.4f}).",
            "Look for text that repeats itself, and for prompts that the draft was trained on.",
        )
    return None


def _doubtful_baseline(evidence: Evidence) -> Decision | None:
    """A known acceptance length settles it, else features and length must look right."""
    baseline, expected = evidence.baseline, evidence.background.expected_baseline
    length = baseline.counts.mean_acceptance_length
    if expected is not None:
        if abs(length / expected - 1) <= EXPECTED_WITHIN:
            return None
        return Decision(
            "ANOMALOUS",
            f"The baseline has a mean acceptance length of {length:.4f}, but --expect-baseline says"
            f" {expected:g} (a difference of {EXPECTED_WITHIN:.0%} is allowed).",
            "Check K, the target, the prompts, and the baseline's config.json.",
        )
    fault = baseline.text.fault
    if fault is not None:
        return Decision(
            "ANOMALOUS",
            f"{fault[0].upper()}{fault[1:]}.",
            "Record the traces again. If you know that they are right, confirm it with the"
            " acceptance length that the baseline has elsewhere: --expect-baseline AL.",
        )
    floor = min_baseline_length(baseline, evidence.policy)
    if length < floor:
        return Decision(
            "ANOMALOUS",
            f"The baseline has a mean acceptance length of only {length:.4f}. With K ="
            f" {baseline.num_draft_tokens}, a draft whose inputs are those it was trained on has at"
            f" least {floor:.2f}.",
            "Check that the draft was trained for this target. If the draft is known to"
            " accept so little elsewhere too, give the known figure: --expect-baseline AL.",
        )
    return None


def min_baseline_length(baseline: DraftCounts, policy: Policy) -> float:
    """Shortest mean acceptance length that a working baseline has: 1 + a + a^2 + ... + a^K.

    Drawn text is harder to guess: a draft that proposes its most likely token is right at best as
    often as that token is drawn, which is at least the mean probability of the drawn tokens. So a
    is a share of that. (Drawn proposals lose less, as far as measured: 2.00 where the share gives
    1.15, on the shipped EAGLE-3 pair at temperature 0.8 and top-p 0.95.)
    """
    a = policy.min_step_acceptance * (baseline.text.mean_token_probability or 1.0)
    return sum(a**j for j in range(baseline.num_draft_tokens + 1))


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
    failing, change = evidence.parts.with_outcome("FAIL"), evidence.change
    if change is None or not failing:
        return None
    return Decision(
        "FAIL",
        f"With {in_percent(change.confidence)} confidence {number_of(failing)} lost more than the"
        f" limit of {evidence.policy.max_category_drop:.2%}: {findings(failing)}.",
        lines(calibrate_on(failing), *lose_less(evidence.background)),
    )


def _beyond_the_limit(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "FAIL":
        return None
    failing = evidence.parts.with_outcome("FAIL")
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
    unsettled = evidence.parts.with_outcome("INCONCLUSIVE")
    if not evidence.policy.every_category_passes or not unsettled:
        return None
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole, but every {kinds_of(evidence.parts.all)} has to pass, and"
        " these prompts do not decide whether a drop is larger than"
        f" {evidence.policy.max_category_drop:.2%}: {findings(unsettled)}.",
        fresh_prompts(f"fresh prompts, with more of {names(unsettled)}", evidence.wording),
    )


def _a_small_part_lost(evidence: Evidence) -> Decision | None:
    lost = [found for found in evidence.parts.all if found.certainly_lost]
    if not lost:
        return None
    policy, least = evidence.policy, evidence.policy.min_category_prompts
    few = f"{least} prompts{' in effect' if any(one.is_context_bin for one in lost) else ''}"
    few += ", or without the declared clusters," if evidence.declared else ""
    number = f"fresh prompts, with at least {least} of {names(lost)}"
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole, but {number_of(lost)} with fewer than {few} lost more than"
        f" {policy.max_category_drop:.2%}, more than chance explains among so many small parts:"
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
    _another_target,
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
    evidence: Evidence, change: PairedChange, reason: str, *, least: int | None = None
) -> Decision:
    required = required_prompts(
        change,
        max_relative_drop=evidence.policy.max_relative_drop,
        power=evidence.policy.power,
        min_prompts=evidence.policy.min_prompts,
    )
    return Decision("INCONCLUSIVE", reason, more_prompts(evidence, required, least), required)


def _whole(change: PairedChange) -> str:
    lower, upper = change.relative_bounds
    return (
        f"the mean acceptance length changed by {change.relative_change:+.2%} (one-sided"
        f" {in_percent(change.confidence)} bounds {lower:+.2%} and {upper:+.2%})"
    )
