"""Replay: decode recorded traces speculatively with a draft, and count what the target accepts.

For greedy decoding this is exact. The draft sees only committed tokens and the target's features
of them, and a greedy target commits the recorded tokens whatever the draft proposes; so the steps
of the online loop, one by one, are the rounds counted here.

A round with last committed token x_n belongs to row n - 1; x_n is also the anchor of a draft that
proposes blocks. The first is row P - 1 (x_P came from prefill), the next one is `accepted + 1` rows
later. A round is counted only if all K drafted positions lie inside the trace, so that its outcome
is fully known. Whether it is depends on its position alone, not on its outcome, so leaving the
others out biases nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..calibration.draft_inputs import check_trace_fits, first_hidden
from ..calibration.feature_evidence import FeatureEvidence, FeatureTally
from ..calibration.near_duplicates import PromptText, num_near_duplicates, prompt_text
from ..calibration.predictions import draft_predictions, num_draft_tokens_fault
from ..calibration.prompt_trace import PromptTrace
from ..calibration.trace_manifest import TargetIdentity
from ..calibration.traces import TraceFolder
from ..quantize.stored.loading import LoadedDraft
from .errors import ReplayError
from .statistics import AcceptanceCounts, pooled, repeated_ngram_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReplay:
    """One prompt under one draft.

    Attributes:
        prompt_sha256: of its token ids, so that one prompt under two ids is known as one; of a
            later turn, that of its conversation's first.
        counts: of the rounds of speculative decoding; no step if the continuation is too short.
        every_position: the same as if a round started at every position: another quantity (it
            over-weights easy text), with less noise when two drafts are compared.
    """

    id: str
    category: str
    prompt_sha256: str
    counts: AcceptanceCounts
    every_position: AcceptanceCounts


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
        repeated_8gram_share: of the continuations; belongs beside every acceptance figure.
        num_near_duplicates: prompts that hardly differ from others; see `num_near_duplicates`.
        features: whether they belong to their tokens.
    """

    sha256: str
    target: TargetIdentity
    repeated_8gram_share: float
    num_near_duplicates: int
    features: FeatureEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReplay:
    """One draft over all prompts of a trace folder.

    Attributes:
        name: the draft. num_draft_tokens: K.
        traces: the same for all drafts of a call.
        prompts: in the order of the traces.
        first_step: against the first draft replayed; that draft agrees with itself.
    """

    name: str
    num_draft_tokens: int
    traces: TraceFigures
    prompts: tuple[PromptReplay, ...]
    first_step: FirstStepAgreement

    @property
    def counts(self) -> AcceptanceCounts:
        """Pooled over the prompts."""
        return pooled((p.counts for p in self.prompts), self.num_draft_tokens)

    @property
    def every_position(self) -> AcceptanceCounts:
        """Pooled over the prompts; see `PromptReplay.every_position`."""
        return pooled((p.every_position for p in self.prompts), self.num_draft_tokens)


def chosen_num_draft_tokens(asked: int | None, drafts: Sequence[LoadedDraft]) -> int:
    """K: as asked, else what all the drafts are made for.

    A block draft fills the block behind its anchor, `block_size` - 1 tokens; a chain has no length
    of its own, 3 is what is usually served.

    Raises:
        ReplayError: nothing is asked, and the drafts differ.
    """
    if asked is not None:
        return asked
    sizes = [draft.geometry.block_size for draft in drafts]
    defaults = [size - 1 if size else 3 for size in sizes]
    if len(set(defaults)) > 1:
        named = ", ".join(f"{d.name} {k}" for d, k in zip(drafts, defaults, strict=True))
        raise ReplayError(
            "--num-draft-tokens",
            f"the drafts propose different numbers of tokens: {named}",
            fix="give one number for all: -k K",
        )
    return defaults[0]


def replay_drafts(
    drafts: Sequence[LoadedDraft],
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[DraftReplay, ...]:
    """Replay drafts over the same traces, reading each trace once.

    Args:
        drafts: the reference (BF16) first.
        traces: recorded greedily.
        num_draft_tokens: K, at least 1, below the block size of a draft that proposes blocks.
        on_progress: called with (prompts done, prompts).

    Returns:
        One result per draft, in order.

    Raises:
        TraceError: the traces do not fit a draft, or are damaged.
        ReplayError: nothing to replay: no draft, a K that one of them cannot propose, or every
            continuation is too short.
    """
    _check_arguments(drafts, traces, num_draft_tokens)
    tallies = [_Tally(draft) for draft in drafts]
    texts: list[PromptText] = []
    features = FeatureTally()
    for done, trace in enumerate(traces, start=1):
        texts.append(prompt_text(trace))
        features.add(trace)
        predicted = [_predictions(draft, traces, trace, num_draft_tokens) for draft in drafts]
        for tally, own in zip(tallies, predicted, strict=True):
            tally.add(trace, predicted[0], own)
        on_progress(done, len(traces))
    figures = TraceFigures(
        sha256=traces.sha256,
        target=traces.manifest.target,
        repeated_8gram_share=repeated_ngram_share(text.continuation for text in texts),
        num_near_duplicates=num_near_duplicates(texts),
        features=features.evidence(),
    )
    return tuple(tally.replay(traces.folder, figures, num_draft_tokens) for tally in tallies)


def accepted_by_row(trace: PromptTrace, predicted: Tensor) -> list[int]:
    """Draft tokens accepted if a round started at each row from P - 1 on.

    Args:
        trace: N tokens, P of them the prompt.
        predicted: [R, K] drafted tokens of those rows, target vocabulary.

    Returns:
        R numbers in [0, K]: the length of the common prefix of drafted and recorded tokens.
    """
    hits = predicted == _recorded(trace, predicted)
    lengths: list[int] = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    return lengths


def rounds(accepted: Sequence[int]) -> list[int]:
    """The rounds of decoding: accepted tokens of row 0, of the row `accepted + 1` later, ..."""
    steps, row = [], 0
    while row < len(accepted):
        steps.append(accepted[row])
        row += accepted[row] + 1
    return steps


class _Tally:
    """What is counted of one draft while the traces go by."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._name = draft.name
        self._prompts: list[PromptReplay] = []
        self._agreement = torch.zeros(4, dtype=torch.int64)

    def add(self, trace: PromptTrace, reference: Tensor, predicted: Tensor) -> None:
        self._prompts.append(_prompt_replay(trace, predicted))
        self._agreement += _agreement_counts(trace, reference, predicted)

    def replay(self, folder: Path, traces: TraceFigures, num_draft_tokens: int) -> DraftReplay:
        if not any(prompt.counts.num_steps for prompt in self._prompts):
            raise ReplayError(
                folder,
                f"no continuation is longer than num_draft_tokens = {num_draft_tokens}",
                fix="record longer continuations",
            )
        rows, equal, only_reference, only_this = self._agreement.tolist()
        return DraftReplay(
            name=self._name,
            num_draft_tokens=num_draft_tokens,
            traces=traces,
            prompts=tuple(self._prompts),
            first_step=FirstStepAgreement(
                num_rows=rows,
                num_equal=equal,
                num_only_reference_hits=only_reference,
                num_only_this_hits=only_this,
            ),
        )


def _check_arguments(
    drafts: Sequence[LoadedDraft], traces: TraceFolder, num_draft_tokens: int
) -> None:
    if not drafts:
        raise ReplayError("drafts", "expected at least one", fix="name a draft folder")
    for draft in drafts:
        fault = num_draft_tokens_fault(draft.geometry, num_draft_tokens)
        if fault:
            raise ReplayError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
        check_trace_fits(draft, traces)


def _predictions(
    draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace, num_draft_tokens: int
) -> Tensor:
    return draft_predictions(
        draft.forward,
        first_hidden(draft, traces, trace),
        trace.token_ids,
        first_row=trace.prompt_length - 1,
        num_draft_tokens=num_draft_tokens,
    )


def _recorded(trace: PromptTrace, predicted: Tensor) -> Tensor:
    """[R, K] the tokens that the rows predict: entry (i, j) is token P + 1 + i + j."""
    rows, depths = predicted.shape
    after_first = trace.token_ids[trace.prompt_length + 1 :]
    return after_first.unfold(0, depths, 1)[:rows] if rows else predicted


def _prompt_replay(trace: PromptTrace, predicted: Tensor) -> PromptReplay:
    accepted = accepted_by_row(trace, predicted)
    num_draft_tokens = predicted.shape[1]
    return PromptReplay(
        id=trace.id,
        category=trace.category,
        prompt_sha256=trace.cluster_sha256,
        counts=_histogram(rounds(accepted), num_draft_tokens),
        every_position=_histogram(accepted, num_draft_tokens),
    )


def _histogram(accepted: Sequence[int], num_draft_tokens: int) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=tuple(accepted.count(j) for j in range(num_draft_tokens + 1)))


def _agreement_counts(trace: PromptTrace, reference: Tensor, predicted: Tensor) -> Tensor:
    """[4] int64 in the order of the fields of FirstStepAgreement."""
    recorded = _recorded(trace, predicted)[:, 0]
    first, this = reference[:, 0], predicted[:, 0]
    hit_first, hit_this = first == recorded, this == recorded
    rows = torch.tensor(len(this))
    return torch.stack(
        [rows, (first == this).sum(), (hit_first & ~hit_this).sum(), (hit_this & ~hit_first).sum()]
    )
