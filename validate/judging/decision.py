"""From evidence to a verdict: a ladder of rules; the first one that applies decides.

Parts are categories of prompts and context bins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...calibration.traces.head_agreement import MIN_AGREEMENT
from ...recipes.brief import apart
from ..counting.draft_counts import DraftCounts
from ..counting.paired_change import PairedChange, RequiredPrompts, required_prompts
from .advice import (
    Evidence,
    findings,
    fresh_prompts,
    kinds_of,
    lines,
    more_prompts,
    names,
    number_of,
    otherwise_made,
    repair,
)
from .categories import outcome
from .policy import Policy, Verdict, Wording, in_percent, worst

EXPECTED_WITHIN = 0.05
"""Relative difference up to which `--expect-baseline` confirms a measured acceptance length."""
_ENOUGH_FOR_RARE_LOSSES = 100
"""Prompts at which a loss in one prompt in twenty passes in 5 % of cases; with 36 it is 9 %."""
_LOADED_WRONGLY = (
    "Check target layers, rope, tensor names and scales with draftquant inspect and draftquant"
    " verify."
)
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
    return next(decision for rung in LADDER if (decision := rung(evidence)))


def worse(first: Decision, second: Decision) -> Decision:
    """The decision with the worse verdict, else the first."""
    return first if worst((first.verdict, second.verdict)) == first.verdict else second


def _different_things(evidence: Evidence) -> Decision | None:
    if not (what := evidence.incomparable):
        return None
    what = f"{what[0].upper()}{what[1:]}"
    return Decision(
        "ANOMALOUS",
        f"{what}: no comparison is possible.",
        evidence.wording.both_again,
    )


def _another_target(evidence: Evidence) -> Decision | None:
    agreement = evidence.background.head_agreement
    if agreement is None or agreement >= MIN_AGREEMENT:
        return None
    told = apart(agreement, MIN_AGREEMENT, ".1%")
    whose = "one of the two targets" if evidence.wording.one_draft else "the target"
    return Decision(
        "ANOMALOUS",
        f"The head of {whose} reproduces only {told} of the recorded tokens from the recorded"
        f" features of its last layer, expected at least {MIN_AGREEMENT:.0%}. The traces were"
        " recorded from another target, or their features do not belong to their tokens.",
        "Record the traces again with --tables, or give the same target to --target.",
    )


def _calibrated_elsewhere(evidence: Evidence) -> Decision | None:
    targets = evidence.background.other_target
    if not targets:
        return None
    return Decision(
        "ANOMALOUS",
        "The candidate was calibrated on traces of another target than it is judged on:"
        f" {targets}.",
        "Calibrate it on traces of the target that it will serve, and judge it on other traces of"
        " that target.",
    )


def _impossible_length(evidence: Evidence, role: str) -> Decision | None:
    draft = evidence.baseline if role == "baseline" else evidence.candidate
    length, most = draft.counts.mean_acceptance_length, draft.num_draft_tokens + 1
    ceiling = evidence.policy.max_ceiling_share * most
    if length < evidence.policy.min_acceptance_length:
        one_draft, whose, check = evidence.wording.one_draft, f"the {role}", _LOADED_WRONGLY
        if one_draft is not None:
            place = one_draft.first if role == "baseline" else one_draft.second
            whose, check = f"the draft {place}", one_draft.breaks
        return Decision(
            "ANOMALOUS",
            f"Almost no token of {whose} is accepted (mean acceptance length {length:.4f}). A loss"
            " of precision does not do that; the draft was probably loaded wrongly.",
            check,
        )
    if length > ceiling:
        told = apart(length, ceiling, ".4f")
        return Decision(
            "ANOMALOUS",
            f"The mean acceptance length of the {role}, {told}, is too close to the maximum of"
            f" {most} (a working draft stays below {ceiling:.4f}).",
            "Look for text that repeats itself, and for prompts that the draft was trained on.",
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
        return Decision(
            "ANOMALOUS",
            f"The baseline has a mean acceptance length of {length:.4f}, but --expect-baseline"
            f" says {expected:g} (a difference of {within:.0%} is allowed).",
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
        told, k = apart(length, floor, ".4f"), baseline.num_draft_tokens
        return Decision(
            "ANOMALOUS",
            f"The baseline has a mean acceptance length of only {told}. With K = {k}, most drafts"
            f" that we know have at least {floor:.2f} beside their own target and less beside"
            " another, but a weak draft may have less beside its own.",
            "Check that the draft was trained for this target and on texts as long as these. If it"
            " is known to accept so little elsewhere too, give the known figure: --expect-baseline"
            " AL.",
        )
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
    """Prompts are never all alike, except where nothing changed."""
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
    if change is None:
        return Decision(
            "INCONCLUSIVE",
            f"There are too few prompts, {count}: the policy {policy.name!r} needs an effective"
            f" sample size of {policy.min_prompts}.",
            fresh_prompts(f"{2 * policy.min_prompts} fresh prompts or more", evidence.wording),
        )
    effective = change.effective_num_prompts
    if effective >= policy.min_prompts:
        return None
    unequal = effective < _USUAL_WEIGHTS * count
    weight = ", because a few of them hold most verify steps" if unequal else ""
    least = change.num_prompts_for(policy.min_prompts)
    told = apart(effective, policy.min_prompts, ".1f")
    return _undecided(
        f"There are too few prompts: {evidence.counted} have an effective sample size of"
        f" {told}{weight}, and the policy {evidence.policy.name!r} needs an effective sample"
        f" size of {evidence.policy.min_prompts}.",
        evidence,
        change,
        least,
    )


def _too_large_a_gain(evidence: Evidence) -> Decision | None:
    change, largest = evidence.change, math.log1p(evidence.policy.max_relative_gain)
    if change is None or change.log_ratio <= largest or evidence.background.unrelated:
        return None
    if one_draft := evidence.wording.one_draft:
        if not one_draft.gains:
            return None
        return Decision(
            "ANOMALOUS",
            f"The acceptance length {one_draft.second} is {change.relative_change:+.2%} above that"
            f" {one_draft.first}. A change of precision does not do that.",
            one_draft.gains,
        )
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
    wording = evidence.wording
    return Decision(
        "FAIL",
        f"With {in_percent(change.confidence)} confidence {number_of(failing)} lost more than the"
        f" limit of {evidence.policy.max_category_drop:.2%}{wording.there}: {findings(failing)}."
        f"{_caused(wording)}",
        repair(evidence, failing),
    )


def _beyond_the_limit(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "FAIL":
        return None
    failing = evidence.parts.with_outcome("FAIL")
    also = f" Categories beyond their own limit: {names(failing)}." if failing else ""
    confidence = in_percent(change.confidence)
    wording = evidence.wording
    return Decision(
        "FAIL",
        f"With {confidence} confidence the drop{wording.there} is larger than the limit of"
        f" {limit:.2%}: {whole_change(change, limit)}.{_caused(wording)}{also}",
        repair(evidence),
    )


def _caused(wording: Wording) -> str:
    """What costs acceptance where one draft was counted twice."""
    if wording.one_draft is None:
        return ""
    return f" The draft is the same on both sides, so {wording.one_draft.cause} costs this."


def _without_a_record(evidence: Evidence) -> Decision | None:
    if not (evidence.policy.record_required and evidence.background.unrecorded):
        return None
    return Decision(
        "ANOMALOUS",
        "The candidate's folder has no record (draftquant.json) of how it was quantized. So"
        " nothing shows that these prompts did not calibrate it, and a draft is judged too well on"
        " prompts that calibrated it.",
        "Give the folder as draftquant wrote it, with its draftquant.json.\nIf another tool made"
        " it, and you know that none of these prompts calibrated it, add --unrecorded.",
    )


def _limit_between_the_bounds(evidence: Evidence) -> Decision | None:
    change, limit = evidence.change, evidence.policy.max_relative_drop
    if change is None or outcome(change, limit) != "INCONCLUSIVE":
        return None
    return _undecided(
        "These prompts do not decide whether the drop is larger than the limit of"
        f" {evidence.policy.max_relative_drop:.2%}: {whole_change(change, limit)}.",
        evidence,
        change,
    )


def _a_part_is_open(evidence: Evidence) -> Decision | None:
    unsettled = evidence.parts.with_outcome("INCONCLUSIVE")
    if not evidence.policy.every_category_passes or not unsettled:
        return None
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole{evidence.wording.there}, but every"
        f" {kinds_of(evidence.parts.all)} has to pass, and these prompts do not decide whether a"
        " drop is larger than"
        f" {evidence.policy.max_category_drop:.2%}: {findings(unsettled)}.",
        fresh_prompts(f"fresh prompts, with more of {names(unsettled)}", evidence.wording),
    )


def _a_small_part_lost(evidence: Evidence) -> Decision | None:
    lost = [part for part in evidence.parts.all if part.certainly_lost]
    if not lost:
        return None
    policy, least = evidence.policy, evidence.policy.min_category_prompts
    few = f"{least} prompts{' in effect' if any(part.is_context_bin for part in lost) else ''}"
    few += ", or without the declared clusters," if evidence.declared else ""
    return Decision(
        "INCONCLUSIVE",
        f"The draft passes as a whole{evidence.wording.there}, but {number_of(lost)} with fewer"
        f" than {few} lost more than {policy.max_category_drop:.2%}, more than chance explains"
        " among so many small parts:"
        f" {findings(lost)}.",
        lines(
            fresh_prompts(
                f"fresh prompts, with at least {least} of {names(lost)}", evidence.wording
            ),
            *otherwise_made(evidence, lost),
        ),
    )


def _not_all_compared(evidence: Evidence) -> Decision | None:
    """Less evidence makes no verdict easier: what was not compared might be an anomaly."""
    missing = evidence.background.not_compared
    if not missing:
        return None
    return Decision(
        "INCONCLUSIVE",
        "The bounds clear the limit, but these files do not show that the two runs can be"
        f" compared. Not compared: {'; '.join(missing)}.",
        lines(*evidence.background.to_compare),
    )


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
    return Decision(
        "PASS",
        f"With {confidence} confidence the drop{evidence.wording.there} is smaller than the limit"
        f" of {limit:.2%}{rare}: {whole}.",
    )


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
    reason: str, evidence: Evidence, change: PairedChange, least: int | None = None
) -> Decision:
    required = required_prompts(
        change,
        max_relative_drop=evidence.policy.max_relative_drop,
        power=evidence.policy.power,
        min_prompts=evidence.policy.min_prompts,
    )
    return Decision("INCONCLUSIVE", reason, more_prompts(evidence, required, least), required)


def whole_change(change: PairedChange, limit: float) -> str:
    """A change and its bounds in words, told from the limit."""
    by, lower, upper = change.in_percent(limit)
    return (
        f"the mean acceptance length changed by {by} (one-sided"
        f" {in_percent(change.confidence)} bounds {lower} and {upper})"
    )
