"""The figures that reports have of one draft, of one prompt, and of two measurements."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.context_bins import ContextCounts
from ..counting.draft_counts import DraftCounts, PromptCounts
from ..counting.draft_replay import DraftReplay
from ..counting.paired_change import PairedChange

EstimatorName = Literal["weighted rounds", "whole outputs"]
"""How verify steps were weighed: see `served.common_rounds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """How two measurements of the same prompts were compared.

    Attributes:
        engine, version, model: of the baseline's server.
        tool: that measured both; None = 'draftquant measure'.
        told_positions: False = figures by position say nothing: only the sums of each request are
            known.
        concurrency: of the baseline's run and of the candidate's; None = not known.
        estimator: "whole outputs" where no prompt tells which rounds lie in common text.
        identical_share: of the prompts, those with the same output on both servers; in [0, 1]. It,
            common_share and repeated_8gram_share are None where the tool does not keep outputs, or
            keeps no tokens.
        common_share: of the output tokens, those that both servers wrote before they parted;
            in [0, 1].
        baseline_mean_acceptance_length, candidate_mean_acceptance_length: of all rounds, as the
            engine counts them.
        whole_change: by all rounds of both outputs, each weighing one.
        common_change: by the rounds inside common text alone, as replay counts; it is of another
            mixture of text where outputs part. Either is None for fewer than two such prompts.
        repeated_8gram_share: of the baseline's outputs.
        mean_token_probability: of the tokens of the baseline's outputs, where they were drawn and
            the server tells it.
        num_near_duplicates: distinct prompts with the same output of the baseline's server.
    """

    engine: str
    version: str
    model: str
    concurrency: tuple[int, int] | None
    estimator: EstimatorName
    identical_share: float | None
    common_share: float | None
    baseline_mean_acceptance_length: float
    candidate_mean_acceptance_length: float
    whole_change: PairedChange | None
    common_change: PairedChange | None
    repeated_8gram_share: float | None
    mean_token_probability: float | None
    num_near_duplicates: int
    tool: str | None = None
    told_positions: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """What was counted of one draft; fields as in `AcceptanceCounts`.

    Attributes:
        every_position_mean_acceptance_length: see `PromptReplay`; None of a draft that was served.
    """

    name: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_steps: float
    num_emitted_tokens: float
    histogram: tuple[float, ...]
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    every_position_mean_acceptance_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """One recorded prompt, with a round at least under both drafts.

    Attributes:
        prompt_sha256, cluster: see `PromptCounts`.
        alike: the same; None = as `cluster`, and what earlier versions wrote.
        baseline, candidate: [K + 1] histograms, see `AcceptanceCounts`.
        baseline_context_bins, candidate_context_bins: [bins, K + 1] the same by context bin,
            without the empty bins at the end; none where the places of the verify steps are not
            known.
    """

    id: str
    category: str
    prompt_sha256: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    cluster: str = ""
    alike: str | None = None
    baseline_context_bins: tuple[tuple[float, ...], ...] = ()
    candidate_context_bins: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, baseline: PromptCounts, candidate: PromptCounts) -> "PromptFigures":
        """Of one prompt under both drafts."""
        both = baseline.contexts, candidate.contexts
        bins = [() if one is None or None in both else one.histograms for one in both]
        return cls(
            id=baseline.id,
            category=baseline.category,
            prompt_sha256=baseline.prompt_sha256,
            baseline=baseline.counts.histogram,
            candidate=candidate.counts.histogram,
            cluster=baseline.cluster,
            alike=None if baseline.alike == baseline.cluster else baseline.alike,
            baseline_context_bins=bins[0],
            candidate_context_bins=bins[1],
        )

    def counts(self, context_edges: Sequence[int], *, of_candidate: bool) -> PromptCounts:
        """Under one of the two drafts."""
        histogram = self.candidate if of_candidate else self.baseline
        bins = self.candidate_context_bins if of_candidate else self.baseline_context_bins
        return PromptCounts(
            id=self.id,
            category=self.category,
            prompt_sha256=self.prompt_sha256,
            counts=AcceptanceCounts(histogram=histogram),
            cluster=self.cluster,
            alike=self.cluster if self.alike is None else self.alike,
            contexts=ContextCounts.of_histograms(bins, len(histogram) - 1, context_edges),
        )


def draft_figures(replay: DraftReplay) -> DraftFigures:
    """The figures of one replayed draft, pooled over its prompts."""
    return dataclasses.replace(
        counted_figures(replay),
        every_position_mean_acceptance_length=replay.every_position.mean_acceptance_length,
    )


def counted_figures(draft: DraftCounts) -> DraftFigures:
    """The figures of one draft, pooled over its prompts; at least one has a round."""
    counts = draft.counts
    return DraftFigures(
        name=draft.name,
        mean_acceptance_length=counts.mean_acceptance_length,
        draft_acceptance_rate=counts.draft_acceptance_rate,
        num_steps=counts.num_steps,
        num_emitted_tokens=counts.num_emitted_tokens,
        histogram=counts.histogram,
        survival=counts.survival,
        conditional=counts.conditional,
    )
