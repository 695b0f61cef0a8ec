"""What a reader has to know beside a verdict: looser limits, copies, and what was not judged."""

from collections.abc import Iterator, Sequence

from ...calibration.traces.suggested_clusters import suggested_clusters
from ..counting.draft_counts import recorded_pairs
from .categories import MIN_PROMPTS_TO_SUSPECT, CategoryFigures, ContextBinFigures, change_of
from .decision import Evidence, accepted_the_same
from .policy import looser_than_release

MOST_NAMED = 20
"""Categories that a sentence names."""


def report_warnings(
    evidence: Evidence, *, num_prompts: int, num_copies: int, num_short_prompts: int
) -> Iterator[str]:
    """Sentences without a full stop, for the `warnings` of the report.
    """
    looser = looser_than_release(evidence.policy)
    if looser:
        yield f"the limits are looser than those of the policy 'release': {', '.join(looser)}"
    if num_short_prompts and evidence.prompts:
        yield (
            f"{num_short_prompts} of the {num_prompts + num_copies + num_short_prompts} prompts"
            f" {'is' if num_short_prompts == 1 else 'are'} left out, too short for a verify step"
        )
    if num_copies:
        yield (
            f"{num_copies} of the prompts {'is a copy' if num_copies == 1 else 'are copies'} of"
            f" others: {num_prompts} distinct prompts were judged"
        )
    alike = evidence.baseline.text.num_near_duplicates
    if len(evidence.prompts) < num_prompts:
        yield (
            f"the {num_prompts} distinct prompts form {len(evidence.prompts)} clusters (near"
            " duplicates, turns of one conversation, or declared in the prompt file); each cluster"
            " counts as one prompt"
        )
    elif alike:
        yield (
            f"{alike} distinct prompts hardly differ from others (the same beginning or the same"
            " continuation), so that the true sample is smaller than their number"
        )
    yield from _wider_of_two(evidence)
    named = [(one.id, one.category) for one in evidence.baseline.prompts if not one.cluster]
    if suggestion := suggested_clusters(named):
        yield suggestion
    if evidence.prompts and accepted_the_same(evidence):
        yield (
            "both drafts accepted the same number of tokens on every prompt: the change of +0.00%"
            " is exact on these prompts"
        )
    parts, least = evidence.parts, evidence.policy.min_category_prompts
    yield from _unjudged(parts.categories, least)
    yield from _unjudged_bins(parts.context_bins, least)
    yield from _falls_with_context(parts.context_bins)
    yield from _placeless(evidence)
    for found in parts.all:
        if found.outcome == "INCONCLUSIVE" and _lost_too_much(found):
            kind = "" if found.is_context_bin else "category "
            yield (
                f"{kind}{found.category!r} lost more than its limit of"
                f" {found.max_relative_drop:.0%}, but that may be chance: record more prompts of it"
            )
    if evidence.look:
        yield (
            f"this is planned interim analysis {evidence.look.number} of {evidence.look.total}"
            f" ({evidence.look.spending}): its bounds hold only if all of them were planned before"
            " the first, with equal numbers of prompts added each time"
        )


def _wider_of_two(evidence: Evidence) -> Iterator[str]:
    """Of the bounds with and without declared clusters: which count."""
    change = evidence.change
    if change and evidence.declared:
        own = change_of(evidence.prompts, change.confidence)
        lower, upper = (
            "with" if getattr(own, bound) == getattr(change, bound) else "without"
            for bound in ("lower", "upper")
        )
        yield (
            "declared clusters narrow no bound, so the wider of those with and without them count:"
            f" the lower one is that {lower}, the upper one that {upper} them"
        )


def _unjudged(categories: Sequence[CategoryFigures], min_prompts: int) -> Iterator[str]:
    small = [found.category for found in categories if not found.outcome]
    if not small:
        return
    named = ", ".join(small[:MOST_NAMED]) + (", ..." if len(small) > MOST_NAMED else "")
    which, verbs = (
        ("1 category has", "is") if len(small) == 1 else (f"{len(small)} categories have", "are")
    )
    yield f"{which} fewer than {min_prompts} prompts and {verbs} not judged alone: {named}"


def _unjudged_bins(bins: Sequence[ContextBinFigures], min_prompts: int) -> Iterator[str]:
    if small := [repr(found.category) for found in bins if not found.outcome]:
        yield (
            f"the verify steps in {', '.join(small)} are of an effective sample size below"
            f" {min_prompts} prompts and are not judged alone"
        )


def _falls_with_context(bins: Sequence[ContextBinFigures]) -> Iterator[str]:
    """Of the baseline: both drafts may be as bad as each other."""
    told = [one for one in bins if one.num_prompts >= MIN_PROMPTS_TO_SUSPECT]
    best = max(told, key=lambda one: one.baseline_mean_acceptance_length, default=None)
    for one in told:
        length = one.baseline_mean_acceptance_length
        if best is not None and length - 1 < (best.baseline_mean_acceptance_length - 1) / 2:
            yield (
                f"the baseline itself accepts {length:.2f} in {one.category!r} and"
                f" {best.baseline_mean_acceptance_length:.2f} in {best.category!r}: the draft was"
                " probably not trained at that length, whatever quantization does"
            )


def _placeless(evidence: Evidence) -> Iterator[str]:
    """Prompts that no bin counts, where bins count others."""
    if not evidence.prompts:  # nothing was compared
        return
    recorded = recorded_pairs(evidence.baseline, evidence.candidate)
    placeless = sum(None in (own.contexts, other.contexts) for own, other in recorded)
    if 0 < placeless < len(recorded):
        yield (
            f"no context bin counts {placeless} of the {len(recorded)} prompts: where their verify"
            " steps began is not known"
        )


def _lost_too_much(found: CategoryFigures) -> bool:
    return found.change is not None and found.change.relative_change < -found.max_relative_drop
