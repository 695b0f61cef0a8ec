"""The figures that reports have of one draft, of one prompt and of two measurements."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...recipes.decode import CONFIDENCE
from ..counting.acceptance_counts import AcceptanceCounts, ContextBins, PromptKey
from ..counting.draft_counts import DraftCounts, DraftReplay, PromptCounts
from ..counting.paired_change import PairedChange
from .policy import EXIT_CODES, Verdict

EstimatorName = Literal["weighted rounds", "whole outputs"]
"""How verify steps were weighed: see `served.common_rounds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """How two measurements of the same prompts were compared; None = the tool does not keep it.

    Attributes:
        tool: that measured both; None = 'draftquant measure'.
        told_positions: False = only the sums of each request are known.
        concurrency: of the baseline's run and of the candidate's.
        identical_share: of the prompts, those with the same output on both servers; in [0, 1].
        common_share: of the output tokens, those that both wrote before they parted; in [0, 1].
        whole_change: by all steps of both outputs, each weighing one.
        common_change: by the steps inside common text alone, as replay counts; it is of another
            mixture of text where outputs part. Either is None for fewer than two such prompts.
        mean_token_probability: of the tokens of the baseline's outputs, where they were drawn.
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
    """What was counted of one draft; the last figure is None of a draft that was served."""

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
class PromptFigures(PromptKey):
    """One recorded prompt under both drafts: [K + 1] histograms, and [bins, K + 1] where known.

    `alike` None = as `cluster`, and what earlier versions wrote.
    """

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
        alike = self.cluster if self.alike is None else self.alike
        counts = AcceptanceCounts(histogram=histogram)
        return PromptCounts.of(self, counts, self.cluster, alike, bins=bins, edges=context_edges)


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


MOST_DRAFT_TOKENS = 1000
_LARGEST_LOG = 20.0  # of a ratio: acceptance lengths lie in [1, K + 1]
_ROUNDING = 1e-9
_MOST_STEPS = 1e12  # of a prompt: sums of them are exact


def exit_code_problem(verdict: Verdict, exit_code: int) -> str:
    """What is wrong with an exit code; empty if nothing."""
    expected = EXIT_CODES[verdict]
    return "" if exit_code == expected else f"exit_code: {verdict} has {expected}, got {exit_code}"


def comparison_problem(
    *,
    num_draft_tokens: int = 1,
    drafts: Sequence[DraftFigures] = (),
    changes: Sequence[PairedChange | None] = (),
    limits: Sequence[float] = (),
    prompts: Sequence[PromptFigures] = (),
    context_edges: Sequence[int] = (),
    bins_add_up: bool = True,
) -> str:
    """The first contradiction of a comparison, "" = none; served bins need not add up."""
    if not 1 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
        return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {num_draft_tokens}"
    for figures in drafts:
        # Drafts that cannot be compared may have drafted with another K each.
        if problem := _figures_problem(
            figures, num_draft_tokens if prompts else max(1, len(figures.histogram) - 1)
        ):
            return problem
    for change in changes:
        if change is not None and (problem := _change_problem(change)):
            return problem
    if not all(0 < limit < 1 for limit in limits):
        return "max_relative_drop: expected a share in (0, 1)"
    for prompt in prompts:
        for histogram in (prompt.baseline, prompt.candidate):
            if (
                not is_histogram(histogram, num_draft_tokens)
                or not 1 <= sum(histogram) < _MOST_STEPS
            ):
                expected = f"expected {num_draft_tokens + 1} counts of verify steps"
                return f"prompts: {prompt.id!r}: {expected}"
        for name, whole, bins in (
            ("baseline_context_bins", prompt.baseline, prompt.baseline_context_bins),
            ("candidate_context_bins", prompt.candidate, prompt.candidate_context_bins),
        ):
            if problem := context_bins_problem(whole, bins, context_edges, add_up=bins_add_up):
                return f"prompts: {prompt.id!r}: {name}: {problem}"
    return ""


def context_bins_problem(
    whole: Sequence[float],
    histograms: Sequence[Sequence[float]],
    edges: Sequence[int],
    *,
    add_up: bool,
) -> str:
    """What is wrong with the context bins of a prompt, [bins, K + 1] or none; empty if nothing."""
    if problem := ContextBins(edges=tuple(edges)).problem():
        return f"context_edges: {problem}"
    if not histograms:
        return ""
    if len(histograms) > len(edges) + 1:
        return f"expected at most {len(edges) + 1} bins, got {len(histograms)}"
    for own in histograms:
        if len(own) != len(whole) or min(own) < 0 or not sum(own) < _MOST_STEPS:
            return f"expected {len(whole)} counts of verify steps"
    sums = map(sum, zip(*histograms, strict=True))
    if add_up and not all(map(_near, sums, whole)):
        return "expected bins that add up to the counts of the prompt"
    return ""


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _figures_problem(figures: DraftFigures, num_draft_tokens: int) -> str:
    if not 1 <= figures.mean_acceptance_length <= num_draft_tokens + 1 + _ROUNDING:
        return f"mean_acceptance_length: expected 1 to {num_draft_tokens + 1}"
    if not is_histogram(figures.histogram, num_draft_tokens):
        return f"histogram: expected {num_draft_tokens + 1} counts of verify steps"
    for name, shares in (("survival", figures.survival), ("conditional", figures.conditional)):
        fits = all(share is None or 0 <= share <= 1 + _ROUNDING for share in shares)
        if len(shares) != num_draft_tokens or not fits:
            return f"{name}: expected {num_draft_tokens} shares in [0, 1]"
    return ""


def is_histogram(counts: Sequence[float], num_draft_tokens: int) -> bool:
    """Whether these are counts of at least one round by number of accepted tokens, 0 to K."""
    return len(counts) == num_draft_tokens + 1 and min(counts) >= 0 and 0 < sum(counts) < 1e18


def _change_problem(change: PairedChange) -> str:
    bounds = (change.lower - _ROUNDING, change.log_ratio, change.upper + _ROUNDING)
    if sorted(bounds) != list(bounds) or max(map(abs, bounds)) > _LARGEST_LOG:
        return "change: expected lower <= log_ratio <= upper, logarithms of ratios"
    problem = CONFIDENCE.problem(change.confidence)
    return f"confidence: {problem}" if problem else ""
