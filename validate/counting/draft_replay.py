"""What replay finds out of a draft: per prompt, over all, and of the traces themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from ...calibration.traces.feature_evidence import FeatureEvidence
from ...calibration.traces.manifest import Sampling, TargetIdentity
from ...quantize.drafts.kv_cache import CacheScaleOrigin
from ...recipes.brief import Brief
from .acceptance_counts import AcceptanceCounts, pooled
from .draft_counts import PromptCounts, TextFigures
from .estimand import DraftSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReplay(PromptCounts):
    """One prompt under one draft; no verify step if the continuation is too short.

    Attributes:
        every_position: the counts as if a round started at every position: another quantity (it
            over-weights easy text), with less noise when two drafts are compared.
        shorter: [K - 1] the counts where only the first 1, 2, .. K - 1 proposals are verified.
    """

    every_position: AcceptanceCounts
    shorter: tuple[AcceptanceCounts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepAgreement:
    """First draft tokens against those of the first draft replayed, over all positions.

    Attributes:
        num_rows: positions compared. num_equal: both drafts propose the same token.
        num_only_reference_hits, num_only_this_hits: positions where exactly one of the two proposes
            the target's token (the off-diagonal of McNemar's table).
    """

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
    """What is known of the traces that were replayed, whatever the draft.

    Attributes:
        sha256: identity of the traces. target: that was recorded.
        temperature, sampling: how its text was continued, 0 and None = greedily.
        mean_token_probability: of the emitted tokens under the target; None for greedy text.
        repeated_8gram_share: of the continuations; belongs beside every acceptance figure.
        num_near_duplicates: prompts that hardly differ from others; see `num_near_duplicates`.
        features: whether they belong to their tokens.
    """

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
        """What is judged of it."""
        return TextFigures(
            mean_token_probability=self.mean_token_probability,
            num_near_duplicates=self.num_near_duplicates,
            fault=self.features.fault(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DraftReplay(Brief):
    """What the target would have accepted of one draft, over all prompts of a trace folder.

    Attributes:
        name: the draft.
        num_draft_tokens: tokens drafted per verify step (K).
        draft_sampling: how the draft chooses its proposals.
        traces: facts about the traces, the same for all drafts of a call.
        prompts: the counts of each prompt, in the order of the traces.
        first_step: how often the first proposed token is that of the first draft of the call.
        family: of the draft; "" = not known.
        draft_vocab_size: rows of its head; None = not known.
        quantized: whether any linear of it is; None = not known.
        cache_scales: of its KV cache in FP8; None = it is not in FP8.
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


def clustered(
    prompts: Sequence[PromptReplay],
    groups: Sequence[Sequence[int]],
    alike: Sequence[Sequence[int]],
) -> tuple[PromptReplay, ...]:
    """Prompts with what they belong together with: that of the first one's hash; and `alike`."""
    found = list(prompts)
    for group in groups:
        if len({prompts[position].prompt_sha256 for position in group}) > 1:
            first = prompts[group[0]].prompt_sha256
            for position in group:
                found[position] = replace(prompts[position], cluster=first)
    for group in alike:
        for position in group:
            name = found[position].cluster if group in groups else prompts[group[0]].id
            found[position] = replace(found[position], alike=name)
    return tuple(found)
