"""The evidence about a draft: its counts prompt by prompt, and the text that they come from.

The sample consists of distinct prompts. Copies, turns of a conversation, near duplicates and
prompts of a declared cluster are not independent: their counts are summed, and count as one.
Declared clusters are kept apart from those that texts show: chosen ones could hide the spread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from ...calibration.passes import DraftSampling
from ...calibration.traces.feature_evidence import FeatureEvidence
from ...calibration.traces.manifest import Sampling, TargetIdentity
from ...quantize.drafts.draft_cache import CacheScaleOrigin
from ...recipes.brief import Brief
from .acceptance_counts import AcceptanceCounts, ContextCounts, PromptKey, pooled

MOST_REPEATED = 0.1
"""Share of repeated 8-grams above which a continuation loops."""
_NEGLIGIBLE = 1e-3
"""Least expected or weighted verify steps: fewer in a context bin say nothing about that bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts(PromptKey):
    """One prompt under one draft.

    `cluster` is the hash of the first of the prompts that it belongs together with, "" = with
    none of another hash; `alike` is the same by the texts alone. `contexts` is None where the
    number of tokens before each step is not known, `repeated_8gram_share` where the continuation
    is not.
    """

    counts: AcceptanceCounts
    cluster: str = ""
    alike: str = ""
    contexts: ContextCounts | None = None
    repeated_8gram_share: float | None = None

    @classmethod
    def of(
        cls,
        prompt: PromptKey,
        counts: AcceptanceCounts,
        cluster: str = "",
        alike: str = "",
        *,
        bins: Sequence[Sequence[float]] = (),
        edges: Sequence[int] = (),
    ) -> "PromptCounts":
        """Make it from a record, with the histograms by context bin that the record has."""
        return PromptCounts(
            id=prompt.id,
            category=prompt.category,
            prompt_sha256=prompt.prompt_sha256,
            counts=counts,
            cluster=cluster,
            alike=alike,
            contexts=ContextCounts.of_histograms(bins, counts.num_draft_tokens, edges),
        )

    @property
    def loops(self) -> bool:
        """Whether its continuation repeats itself."""
        return (self.repeated_8gram_share or 0.0) > MOST_REPEATED

    @property
    def counted_with(self) -> str:
        """The hash of what the prompt is counted with; for most prompts their own hash."""
        return self.cluster or self.prompt_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFigures:
    """What is known of the generated text; `fault`: why no draft can be judged by it."""

    mean_token_probability: float | None
    num_near_duplicates: int
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDraft:
    """One draft that was served, or that a report describes."""

    name: str
    num_draft_tokens: int
    prompts: tuple[PromptCounts, ...]
    counts: AcceptanceCounts
    text: TextFigures


RecordedPair = tuple[PromptCounts, PromptCounts]
"""One recorded prompt under the baseline and under the candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """One cluster of prompts under both drafts, summed."""

    baseline: AcceptanceCounts
    candidate: AcceptanceCounts


def context_edges(prompts: Iterable[PromptCounts]) -> tuple[int, ...]:
    """Edges of the context bins by which prompts were counted; none where none were."""
    known = (prompt.contexts.bins.edges for prompt in prompts if prompt.contexts is not None)
    return next(known, ())


def by_context(prompts: Iterable[PromptCounts]) -> dict[str, AcceptanceCounts]:
    """Counts of all prompts by context bin, such as 1k-4k, the shortest first; no empty bins."""
    by_label: dict[str, AcceptanceCounts] = {}
    known = [prompt.contexts for prompt in prompts if prompt.contexts is not None]
    for number, label in enumerate(known[0].bins.labels if known else ()):
        counts = pooled((c.counts[number] for c in known), known[0].counts[0].num_draft_tokens)
        if counts.num_steps:
            by_label[label] = counts
    return by_label


def recorded_pairs(baseline: "DraftCounts", candidate: "DraftCounts") -> list[RecordedPair]:
    """The prompts of two drafts, in one order, with at least one verify step under both."""
    both = zip(baseline.prompts, candidate.prompts, strict=True)
    return [(b, q) for b, q in both if b.counts.num_steps and q.counts.num_steps]


def in_context_bin(recorded: Iterable[RecordedPair], number: int) -> list[RecordedPair]:
    """The steps of one context bin, for the prompts that have any there under both drafts."""
    pairs = []
    for first, second in recorded:
        before, after = (each.contexts and each.contexts.counts[number] for each in (first, second))
        if before and after and min(before.num_steps, after.num_steps) > _NEGLIGIBLE:
            pairs.append((replace(first, counts=before), replace(second, counts=after)))
    return pairs


def undeclared(recorded: Sequence[RecordedPair]) -> list[RecordedPair]:
    """The same prompts in the clusters that their texts show; none where no others are declared."""
    if all(first.cluster == first.alike for first, _ in recorded):
        return []
    return [(replace(first, cluster=first.alike), second) for first, second in recorded]


def ungrouped(recorded: Sequence[RecordedPair]) -> list[RecordedPair]:
    """The same prompts, with their copies only; none where no others belong together."""
    if not any(first.cluster for first, _ in recorded):
        return []
    return [(replace(first, cluster=""), second) for first, second in recorded]


def distinct_prompts(recorded: Iterable[RecordedPair]) -> tuple[PromptPair, ...]:
    """One pair per cluster, in the order of their first prompts."""
    by_name: dict[str, PromptPair] = {}
    for baseline, candidate in recorded:
        before, after, name = baseline.counts, candidate.counts, baseline.counted_with
        if known := by_name.get(name):
            before, after = known.baseline + before, known.candidate + after
        by_name[name] = PromptPair(baseline=before, candidate=after)
    return tuple(by_name.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReplay(PromptCounts):
    """One prompt under one draft; no verify step if the continuation is too short.

    `every_position` counts as if a step began at every position: another quantity (it over-weights
    easy text), with less noise when two drafts are compared. `shorter` [K - 1] has the counts where
    only the first 1, 2, .. K - 1 proposals are verified. `steps` are accepted tokens of
    each verify step in order; none where proposals are drawn.
    """

    every_position: AcceptanceCounts
    shorter: tuple[AcceptanceCounts, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstStepAgreement:
    """First draft tokens compared with the first draft's, with McNemar's off-diagonal."""

    num_rows: int
    num_equal: int
    num_only_reference_hits: int
    num_only_this_hits: int

    @property
    def share(self) -> float:
        """num_equal / num_rows, in [0, 1]."""
        return self.num_equal / self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """What is known of the replayed traces; temperature 0 and no sampling = greedy."""

    sha256: str
    target: TargetIdentity
    temperature: float
    sampling: Sampling | None
    mean_token_probability: float | None
    repeated_8gram_share: float
    num_near_duplicates: int
    features: FeatureEvidence

    @property
    def text(self) -> TextFigures:
        """The facts about the text that the gate judges."""
        return TextFigures(
            mean_token_probability=self.mean_token_probability,
            num_near_duplicates=self.num_near_duplicates,
            fault=self.features.fault(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DraftReplay(Brief):
    """What the target would have accepted from one draft, over all prompts of a trace folder.

    Attributes:
        name: the draft.
        num_draft_tokens: tokens drafted per verify step (K).
        draft_sampling: how the draft chooses its proposals.
        traces: facts about the traces, the same for all drafts of a call.
        prompts: the counts of each prompt, in the order of the traces.
        first_step: how often the first proposed token is that of the first draft of the call.
        family: its family; "" = not known.
        draft_vocab_size: rows of its head; None = not known.
        quantized: whether any of its linears is; None = not known.
        cache_scales: of its KV cache in FP8; None = the cache is not in FP8.
    """

    name: str
    num_draft_tokens: int
    draft_sampling: DraftSampling = "greedy"
    traces: TraceFigures
    prompts: tuple[PromptReplay, ...]
    first_step: FirstStepAgreement
    family: str = ""
    draft_vocab_size: int | None = None
    quantized: bool | None = None
    cache_scales: CacheScaleOrigin | None = None

    @property
    def text(self) -> TextFigures:
        """Figures of the recorded text."""
        return self.traces.text

    @property
    def counts(self) -> AcceptanceCounts:
        """Counts of the verify steps, pooled over the prompts."""
        return pooled((p.counts for p in self.prompts), self.num_draft_tokens)

    @property
    def every_position(self) -> AcceptanceCounts:
        """Counts of drafting at every position of the output, pooled over the prompts."""
        return pooled((p.every_position for p in self.prompts), self.num_draft_tokens)

    @override
    def brief(self) -> Mapping[str, object]:
        counts = self.counts
        return {
            "acceptance length": f"acceptance length {counts.mean_acceptance_length:.4f}",
            "draft": self.name,
            "K": self.num_draft_tokens,
            "prompts": len(self.prompts),
            "verify steps": f"{counts.num_steps:,}",
        }


DraftCounts = CountedDraft | DraftReplay
"""One draft over all prompts, in an order that both drafts of a comparison share."""


def clustered(
    prompts: Sequence[PromptReplay], groups: Sequence[Sequence[int]], alike: Sequence[Sequence[int]]
) -> tuple[PromptReplay, ...]:
    """Prompts with the cluster that they belong to, named by its first hash; and `alike`."""
    grouped = list(prompts)
    for group in groups:
        if len({prompts[position].prompt_sha256 for position in group}) > 1:
            first = prompts[group[0]].prompt_sha256
            for position in group:
                grouped[position] = replace(prompts[position], cluster=first)
    for group in alike:
        for position in group:
            name = grouped[position].cluster if group in groups else prompts[group[0]].id
            grouped[position] = replace(grouped[position], alike=name)
    return tuple(grouped)
