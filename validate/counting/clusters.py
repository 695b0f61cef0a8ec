"""Distinct prompts: what the gate samples.

Copies of a prompt, recorded under whatever ids, are one prompt that was decoded several times, the
turns of a conversation are one text, and prompts that hardly differ, or that their author put into
one cluster, are no independent samples. Their counts are summed: the sum weighs as much as they do
together, and counts as one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .acceptance_counts import AcceptanceCounts
from .draft_counts import DraftCounts, PromptCounts

RecordedPair = tuple[PromptCounts, PromptCounts]
"""One recorded prompt under the baseline and under the candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """One cluster of prompts under both drafts, summed."""

    baseline: AcceptanceCounts
    candidate: AcceptanceCounts

    def __add__(self, copy: "PromptPair") -> "PromptPair":
        return PromptPair(
            baseline=self.baseline + copy.baseline, candidate=self.candidate + copy.candidate
        )


def recorded_pairs(baseline: DraftCounts, candidate: DraftCounts) -> list[RecordedPair]:
    """The prompts of two drafts, in one order, that have at least one round under both."""
    both = zip(baseline.prompts, candidate.prompts, strict=True)
    return [(b, q) for b, q in both if b.counts.num_steps and q.counts.num_steps]


def cluster_of(prompt: PromptCounts) -> str:
    """What the prompt is counted together with; of most prompts their own hash."""
    return prompt.cluster or prompt.prompt_sha256


def distinct_prompts(recorded: Iterable[RecordedPair]) -> tuple[PromptPair, ...]:
    """One pair per cluster, in the order of their first prompts.

    Asked of one category, it sums the prompts in that category: a cluster whose prompts carry
    several categories is one of each.
    """
    found: dict[str, PromptPair] = {}
    for baseline, candidate in recorded:
        pair = PromptPair(baseline=baseline.counts, candidate=candidate.counts)
        cluster = cluster_of(baseline)
        known = found.get(cluster)
        found[cluster] = known + pair if known else pair
    return tuple(found.values())
