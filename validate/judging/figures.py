"""The figures that reports give for one draft, one prompt and two measurements."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from ..counting.acceptance_counts import AcceptanceCounts, ContextBins, PromptKey, Verification
from ..counting.draft_counts import DraftCounts, DraftReplay, PromptCounts
from ..counting.paired_change import PairedChange

EstimatorName = Literal["weighted rounds", "whole outputs"]
REPLAY = "replay"
"""The engine of one draft that was replayed beside two targets; `model` is then the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigures:
    """How two measurements of the same prompts were compared; None = the tool does not record it.

    `identical_share` is of the prompts, `common_share` of the output tokens before outputs part.
    `whole_change` is over all steps of both outputs, `common_change` over those in common text, as
    replay counts; either is None for fewer than two such prompts. `verification` is that of drawn
    proposals, None where nothing was drawn or the server does not tell. `apart` is in what two
    servers of one draft differ, "key: one, other" each; empty where two drafts are compared.
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
    verification: Verification | None = None
    apart: tuple[str, ...] = ()

    @property
    def of_one_draft(self) -> bool:
        """One draft was counted twice: beside two targets, or on two servers."""
        return self.of_targets or bool(self.apart)

    @property
    def of_targets(self) -> bool:
        """One draft was replayed beside two targets."""
        return self.engine == REPLAY


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """The counted figures of one draft; the last is None for a draft that was served."""

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

    `alike` None = equal to `cluster`, as in reports of earlier builds. `repeated_8gram_share` is of
    the continuation, None = not known.
    """

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    cluster: str = ""
    alike: str | None = None
    repeated_8gram_share: float | None = None
    baseline_context_bins: tuple[tuple[float, ...], ...] = ()
    candidate_context_bins: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, baseline: PromptCounts, candidate: PromptCounts) -> "PromptFigures":
        """The figures of one prompt under both drafts."""
        both = baseline.contexts, candidate.contexts
        bins = [() if c is None or None in both else c.histograms for c in both]
        return cls(
            id=baseline.id,
            category=baseline.category,
            prompt_sha256=baseline.prompt_sha256,
            baseline=baseline.counts.histogram,
            candidate=candidate.counts.histogram,
            cluster=baseline.cluster,
            alike=None if baseline.alike == baseline.cluster else baseline.alike,
            repeated_8gram_share=baseline.repeated_8gram_share,
            baseline_context_bins=bins[0],
            candidate_context_bins=bins[1],
        )

    def counts(self, context_edges: Sequence[int], *, of_candidate: bool) -> PromptCounts:
        """The counts under one of the two drafts."""
        histogram = self.candidate if of_candidate else self.baseline
        bins = self.candidate_context_bins if of_candidate else self.baseline_context_bins
        alike = self.cluster if self.alike is None else self.alike
        counts = AcceptanceCounts(histogram=histogram)
        told = PromptCounts.of(self, counts, self.cluster, alike, bins=bins, edges=context_edges)
        return replace(told, repeated_8gram_share=self.repeated_8gram_share)


def draft_figures(draft: DraftCounts) -> DraftFigures:
    """The figures of one draft, pooled over its prompts; at least one has a verify step."""
    counts, every = draft.counts, None
    if isinstance(draft, DraftReplay):
        every = draft.every_position.mean_acceptance_length
    names = [each.name for each in fields(DraftFigures)][1:-1]
    return DraftFigures(
        name=draft.name,
        **{name: getattr(counts, name) for name in names},
        every_position_mean_acceptance_length=every,
    )


MOST_DRAFT_TOKENS = 1000
ROUNDING = 1e-9
"""Tolerance for sums computed on another machine."""
_MOST_STEPS = 1e12  # of a prompt: sums of this many are exact


def prompt_problem(
    prompt: PromptFigures, num_draft_tokens: int, edges: Sequence[int], *, add_up: bool
) -> str:
    """What is wrong with the counts of a prompt; bins of served ones need not add up."""
    for role in ("baseline", "candidate"):
        whole = getattr(prompt, role)
        if not is_histogram(whole, num_draft_tokens) or not 1 <= sum(whole) < _MOST_STEPS:
            return f"expected {num_draft_tokens + 1} counts of verify steps"
    for role in ("baseline", "candidate"):
        whole, bins = getattr(prompt, role), getattr(prompt, f"{role}_context_bins")
        if problem := context_bins_problem(whole, bins, edges, add_up=add_up):
            return f"{role}_context_bins: {problem}"
    return ""


def context_bins_problem(
    whole: Sequence[float],
    histograms: Sequence[Sequence[float]],
    edges: Sequence[int],
    *,
    add_up: bool,
) -> str:
    """What is wrong with a prompt's context bins, [bins, K + 1] or none; empty if nothing."""
    if problem := ContextBins(edges=tuple(edges)).problem():
        return f"context_edges: {problem}"
    if not histograms:
        return ""
    if len(histograms) > len(edges) + 1:
        return f"expected at most {len(edges) + 1} bins, got {len(histograms)}"
    for histogram in histograms:
        if len(histogram) != len(whole) or min(histogram) < 0 or not sum(histogram) < _MOST_STEPS:
            return f"expected {len(whole)} counts of verify steps"
    near = partial(math.isclose, rel_tol=ROUNDING, abs_tol=ROUNDING)
    if add_up and not all(map(near, map(sum, zip(*histograms, strict=True)), whole)):
        return "expected bins that add up to the counts of the prompt"
    return ""


def is_histogram(counts: Sequence[float], num_draft_tokens: int) -> bool:
    """Whether these are counts of at least one verify step by accepted tokens, 0 to K."""
    return len(counts) == num_draft_tokens + 1 and min(counts) >= 0 and 0 < sum(counts) < 1e18


def differences(where: str, wanted: Any, got: Any) -> Iterator[tuple[str, object, object]]:
    """Differences of two equal trees of records: place, expected, got; rounding is none."""
    if is_dataclass(wanted) and is_dataclass(got):
        for each in fields(wanted):
            expected, actual = getattr(wanted, each.name), getattr(got, each.name)
            yield from differences(f"{where}.{each.name}", expected, actual)
    elif isinstance(wanted, tuple) and isinstance(got, tuple):
        if len(wanted) != len(got):
            yield where, f"{len(wanted)} of them", f"{len(got)}"
        for i, (expected, actual) in enumerate(zip(wanted, got, strict=False)):
            yield from differences(f"{where}[{i}]", expected, actual)
    elif isinstance(wanted, float) and isinstance(got, int | float):
        if not math.isclose(wanted, got, rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield where, wanted, got
    elif wanted != got:
        yield where, wanted, got
