"""What a reader has to know beside a verdict: looser limits, copies, and what was not judged."""

from collections.abc import Iterator, Sequence

from ...calibration.traces.suggested_clusters import suggested_clusters
from .categories import CategoryFigures
from .decision import Evidence, accepted_the_same
from .policy import looser_than_release


def report_warnings(
    evidence: Evidence, *, num_prompts: int, num_copies: int, num_short_prompts: int
) -> Iterator[str]:
    """Sentences without a full stop, for the `warnings` of the report.

    Args:
        evidence: the verdict's.
        num_prompts: distinct ones.
        num_copies: recorded prompts beyond the first of each distinct one.
        num_short_prompts: recorded prompts that are left out.
    """
    looser = looser_than_release(evidence.policy)
    if looser:
        yield f"looser than release: {', '.join(looser)}"
    if num_short_prompts and evidence.prompts:
        yield (
            f"{num_short_prompts} of the recorded prompts"
            f" {'is' if num_short_prompts == 1 else 'are'} left out: too short for a verify step"
        )
    if num_copies:
        yield (
            f"{num_copies} of the recorded prompts are copies of others:"
            f" {num_prompts} distinct prompts were judged"
        )
    alike = evidence.baseline.text.num_near_duplicates
    if len(evidence.prompts) < num_prompts:
        yield (
            f"the {num_prompts} distinct prompts are {len(evidence.prompts)} clusters (near"
            " duplicates, turns of a conversation, or declared in the prompt file): the counts of"
            " each cluster are summed and judged as one prompt"
        )
    elif alike:
        yield (
            f"{alike} distinct prompts hardly differ from others"
            " (the same beginning or the same continuation): they say less than they count"
        )
    named = [(one.id, one.category) for one in evidence.baseline.prompts if not one.cluster]
    if suggestion := suggested_clusters(named):
        yield suggestion
    if evidence.prompts and accepted_the_same(evidence):
        yield "the two drafts accepted the same everywhere: +0.00 % is measured, not estimated"
    yield from _unjudged(evidence.categories, evidence.policy.min_category_prompts)
    for found in evidence.categories:
        if found.outcome == "INCONCLUSIVE" and _lost_too_much(found):
            yield (
                f"category {found.category!r} lost more than its {found.max_relative_drop:.0%} as"
                " measured, within the bounds of chance: record more prompts of it"
            )
    if evidence.look:
        yield (
            f"look {evidence.look.number} of {evidence.look.total} ({evidence.look.spending}): its"
            " bounds hold for looks that were planned before the first, after equal additions"
        )


def _unjudged(categories: Sequence[CategoryFigures], min_prompts: int) -> Iterator[str]:
    small = [found for found in categories if not found.outcome]
    if small and len(small) == len(categories):
        yield (
            f"none of the {len(small)} categories was judged by itself: each has fewer than"
            f" {min_prompts} prompts"
        )
    elif small:
        yield (
            f"{len(small)} of the {len(categories)} categories, with fewer than {min_prompts}"
            f" prompts each ({sum(found.num_prompts for found in small)} together), were not judged"
            " by themselves"
        )


def _lost_too_much(found: CategoryFigures) -> bool:
    return found.change is not None and found.change.relative_change < -found.max_relative_drop
