"""Replay: decode recorded traces speculatively with a draft, and count what the target accepts.

For greedy decoding this is exact: a greedy target commits the recorded tokens whatever the draft
proposes, so the verify steps are those of the online loop, one by one.

A step with last committed token x_n belongs to row n - 1; x_n is also the anchor of a draft that
proposes blocks. The first is row P - 1 (x_P came from prefill); the next is `accepted + 1` rows
later. A step counts only if all K drafted positions lie inside the trace: that depends only on its
position, not on its outcome, so leaving the others out causes no bias.

A drawn proposal y ~ q is accepted with probability min(1, p(y) / q(y)); otherwise the target draws
from what is left of p. So in a text that the target wrote alone, the token x was an
accepted proposal with probability min(q(x), p(x)) / p(x), that is

    c = min(1, q(x) / p(x)).

Block verification (Sun et al., arXiv 2403.10444) accepts at least i proposals of a path with
probability b_i = min(1, b_(i-1) p(y_i) / q(y_i)), b_0 = 1. Of the steps that got as far as i - 1,
the share that also accepts the recorded token x_i is therefore

    c_i = min(1, q(x_i) / (p(x_i) b_(i-1))).

This gives the probability that a step began at each row: an expectation, without random numbers.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...calibration.passes import DraftSampling
from ...calibration.passes.draft_inputs import (
    MAX_TOKENS,
    batches_of,
    check_trace_fits,
    read_ahead,
    work_of,
)
from ...calibration.passes.proposals import Proposals, num_draft_tokens_fault
from ...calibration.traces.feature_evidence import FeatureTally
from ...calibration.traces.prompt_trace import PromptTrace
from ...calibration.traces.related_prompts import (
    PromptText,
    alike_groups,
    num_near_duplicates,
    prompt_text,
    related_groups,
)
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.drafts.draft_cache import scale_origin
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import ReplayError
from ...recipes.listener import Progress, unseen
from .acceptance_counts import (
    CONTEXT_BINS,
    AcceptanceCounts,
    ContextBins,
    ContextCounts,
    repeated_ngram_share,
)
from .draft_counts import DraftReplay, FirstStepAgreement, PromptReplay, TraceFigures, clustered
from .replay_cache import Elsewhere, ReplayCache, ReplayQuestion


def counted_prompt(
    trace: PromptTrace,
    proposed: Proposals,
    bins: ContextBins = CONTEXT_BINS,
    draft_sampling: DraftSampling = "probabilistic",
) -> PromptReplay:
    """Counts, or expected counts where the draft draws its tokens.

    Where fewer proposals are verified, the next step begins elsewhere, so these are not sums of
    the counts at K. A block that is drafted whole and then cut is what vLLM's schedule by batch
    size verifies.
    """
    predicted, drafted = proposed.token_ids, proposed.recorded_logprobs
    first = trace.prompt_length + 1  # the token of prefill comes before the first step too
    depths = range(1, predicted.shape[1])
    shorter: Iterator[AcceptanceCounts]
    steps: list[int] = []
    if drafted is None or trace.token_logprob is None:
        accepted, most = accepted_by_row(trace, predicted), predicted.shape[1]
        steps = decoding_steps(accepted)
        counts = AcceptanceCounts.of(steps, most)
        contexts = ContextCounts.of_steps(steps, first, most, bins)
        every_position = AcceptanceCounts.of(accepted, most)
        cut = ([min(length, depth) for length in accepted] for depth in depths)
        shorter = map(AcceptanceCounts.of, map(decoding_steps, cut), depths)
    else:
        target = _after_first(trace.token_logprob, predicted)
        accepting = block_acceptance if draft_sampling == "block" else acceptance_probabilities
        likely = accepting(drafted, target)
        outcomes = outcome_probabilities(likely)
        begun = chances_of_beginning(outcomes)
        counts = _expected(begun, outcomes)
        rows = bins.slices(first, len(outcomes))
        of_bins = tuple(_expected(begun[part], outcomes[part]) for part in rows)
        contexts = ContextCounts(bins=bins, counts=of_bins)
        every_position = steps_at_every_row(outcomes)
        shorter = (expected_steps(outcome_probabilities(likely[:, :depth])) for depth in depths)
    return PromptReplay(
        id=trace.id,
        category=trace.category,
        prompt_sha256=trace.cluster_sha256,
        counts=counts,
        contexts=contexts,
        repeated_8gram_share=repeated_ngram_share([trace.continuation]),
        every_position=every_position,
        shorter=tuple(shorter),
        steps=tuple(steps),
    )


def accepted_by_row(trace: PromptTrace, predicted: Tensor) -> list[int]:
    """[R] in [0, K]: common prefix of the drafted [R, K] target ids and the recorded tokens."""
    hits = predicted == recorded_tokens(trace, predicted)
    lengths: list[int] = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    return lengths


def decoding_steps(accepted: Sequence[int]) -> list[int]:
    """The steps of decoding: accepted tokens of row 0, of the row `accepted + 1` later, ..."""
    steps, row = [], 0
    while row < len(accepted):
        steps.append(accepted[row])
        row += accepted[row] + 1
    return steps


def recorded_tokens(trace: PromptTrace, predicted: Tensor) -> Tensor:
    """[R, K] the tokens that the rows predict: entry (i, j) is token P + 1 + i + j."""
    return _after_first(trace.token_ids[trace.prompt_length :], predicted)


def _after_first(continued: Tensor, predicted: Tensor) -> Tensor:
    """[R, K] of a value known for each token of the continuation, for the rows that predict it."""
    rows, depths = predicted.shape
    return continued[1:].unfold(0, depths, 1)[:rows] if rows else continued.new_empty((0, depths))


def acceptance_probabilities(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """[R, K] float64 c of recorded tokens, from log q (-infinity = never proposed) and log p."""
    return (draft_logprobs.double() - target_logprobs.double()).clamp(max=0).exp()


def block_acceptance(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """[R, K] float64 c of recorded tokens that are verified as a block; otherwise as above."""
    ratios = draft_logprobs.double() - target_logprobs.double()
    accepted, of_path = torch.empty_like(ratios), ratios.new_zeros(len(ratios))  # log b of the path
    for depth, ratio in enumerate(ratios.unbind(1)):
        accepted[:, depth] = (ratio - of_path).clamp(max=0).exp()
        of_path = (of_path - ratio).clamp(max=0)
    return accepted


def outcome_probabilities(accepted: Tensor) -> Tensor:
    """[R, K + 1] chances of accepting exactly 0 .. K: prod_{i<j} c_i * (1 - c_j), and prod c_i."""
    ones = accepted.new_ones((len(accepted), 1))
    reached = torch.cat([ones, accepted.cumprod(dim=1)], dim=1)
    return torch.cat([reached[:, :-1] * (1 - accepted), reached[:, -1:]], dim=1)


def expected_steps(outcomes: Tensor) -> AcceptanceCounts:
    """Expected number of steps by accepted tokens, if the first begins at row 0; of [R, K + 1]."""
    return _expected(chances_of_beginning(outcomes), outcomes)


def chances_of_beginning(outcomes: Tensor) -> Tensor:
    """[R] probability that a step begins at each row, if the first begins at row 0; of [R, K + 1].

    A step at row r that accepts j tokens is followed by one at row r + j + 1.
    """
    begins = [1.0] + [0.0] * (len(outcomes) + outcomes.shape[1])
    for row, probabilities in enumerate(outcomes.tolist()):
        for accepted, probability in enumerate(probabilities):
            begins[row + accepted + 1] += begins[row] * probability
    return outcomes.new_tensor(begins[: len(outcomes)])


def _expected(begun: Tensor, outcomes: Tensor) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=tuple((begun @ outcomes).tolist()))


def steps_at_every_row(outcomes: Tensor) -> AcceptanceCounts:
    """The same as if a verify step began at every row."""
    return AcceptanceCounts(histogram=tuple(outcomes.sum(dim=0).tolist()))


def replay_drafts(
    drafts: Sequence[LoadedDraft],
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    draft_sampling: DraftSampling = "greedy",
    batch_size: int | None = None,
    max_tokens: int = MAX_TOKENS,
    cache: ReplayCache | None = None,
    elsewhere: Elsewhere | None = None,
    on_progress: Progress = unseen,
) -> tuple[DraftReplay, ...]:
    """Replay drafts over the same traces, the reference (BF16) first, reading each trace once.

    Args:
        num_draft_tokens: K, at least 1, below the block size of a draft that proposes blocks.
        batch_size: prompts that go through a draft together; None = as many as `max_tokens` allows.
            If a draft rounds its inputs under one scale of a whole call, they run one at a time.
        cache: proposals of the first draft, unless it is quantized.
        elsewhere: computes the proposals that are not known, instead of passes here.
        on_progress: called with (work done, work) after each batch of each draft.
    """
    if not drafts:
        raise ReplayError("drafts", "expected at least one", fix="name a draft folder")
    check_drafts(drafts, traces, num_draft_tokens)
    temperature = _draft_temperature(traces, draft_sampling)
    if not all(draft.rounds_alone for draft in drafts):
        batch_size = 1
    batches = batches_of(traces.manifest.prompts, max_tokens=max_tokens, max_prompts=batch_size)
    asked = ReplayQuestion(
        draft=drafts[0],
        traces=traces,
        batches=batches,
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
    )
    kept_in = None if drafts[0].quantized else cache
    recalled = None if kept_in is None else kept_in.recall(asked)
    known: list[Sequence[Proposals] | None] = [recalled, *[None] * (len(drafts) - 1)]
    if elsewhere is not None:
        every = [dataclasses.replace(asked, draft=draft) for draft in drafts]
        unknown = [q for q, proposals in zip(every, known, strict=True) if proposals is None]
        answers = iter(elsewhere(unknown))
        known = [next(answers) if proposals is None else proposals for proposals in known]
    reference: dict[int, Proposals] = {}
    tallies = [_Tally() for _ in drafts]
    likely, num_likely = 0.0, 0
    by_position: dict[int, PromptText] = {}
    features = FeatureTally()
    for position, trace, proposed in _proposed(drafts, asked, known, on_progress):
        if kept_in is not None:
            reference[position] = proposed[0]
        by_position[position] = prompt_text(trace)
        features.add(trace)
        if trace.token_logprob is not None:
            likely += float(trace.token_logprob.double().exp().sum())
            num_likely += len(trace.token_logprob)
        for tally, drafted in zip(tallies, proposed, strict=True):
            tally.prompts[position] = counted_prompt(trace, drafted, draft_sampling=draft_sampling)
            tally.agreement += _agreement(trace, proposed[0].token_ids, drafted.token_ids)
    if kept_in is not None and recalled is None:
        kept_in.keep(asked, [proposals for _, proposals in sorted(reference.items())])
    texts = [text for _, text in sorted(by_position.items())]
    groups = related_groups(texts), alike_groups(texts)
    if not any(prompt.counts.num_steps for tally in tallies for prompt in tally.prompts.values()):
        what = f"no continuation is longer than num_draft_tokens = {num_draft_tokens}"
        raise ReplayError(traces.folder, what, fix="record longer continuations")
    manifest = traces.manifest
    figures = TraceFigures(
        sha256=traces.sha256,
        target=manifest.target,
        temperature=manifest.temperature,
        sampling=manifest.sampling,
        mean_token_probability=likely / num_likely if manifest.sampled and num_likely else None,
        repeated_8gram_share=repeated_ngram_share(text.continuation for text in texts),
        num_near_duplicates=num_near_duplicates(texts),
        features=features.evidence(),
    )
    return tuple(
        DraftReplay(
            name=draft.name,
            num_draft_tokens=num_draft_tokens,
            draft_sampling=draft_sampling,
            traces=figures,
            prompts=clustered([prompt for _, prompt in sorted(tally.prompts.items())], *groups),
            first_step=FirstStepAgreement(*tally.agreement.tolist()),
            family=draft.family.name,
            draft_vocab_size=draft.geometry.draft_vocab_size,
            quantized=bool(draft.quantized),
            cache_scales=scale_origin(draft.cache_scales),
        )
        for draft, tally in zip(drafts, tallies, strict=True)
    )


class _Tally:
    def __init__(self) -> None:
        self.prompts: dict[int, PromptReplay] = {}
        self.agreement = torch.zeros(4, dtype=torch.int64)


def check_drafts(drafts: Sequence[LoadedDraft], traces: TraceFolder, num_draft_tokens: int) -> None:
    """ReplayError, TraceError: a draft cannot draft so many tokens, or cannot read the traces."""
    for draft in drafts:
        if fault := num_draft_tokens_fault(draft.geometry, num_draft_tokens):
            raise ReplayError(f"{draft.name}: num_draft_tokens", fault[0], fix=fault[1])
        check_trace_fits(draft, traces)


def _draft_temperature(traces: TraceFolder, draft_sampling: DraftSampling) -> float | None:
    if draft_sampling == "greedy":
        return None
    manifest = traces.manifest
    if not manifest.sampled:
        raise ReplayError(
            traces.folder,
            "the traces are greedy, and with a greedy target engines let the draft choose greedily"
            " too",
            fix="drop --draft-sampling, or record with a --temperature",
        )
    if not manifest.logprobs_as_sampled:
        raise ReplayError(
            traces.folder,
            "holds raw log-probabilities, but its tokens were drawn from processed ones",
            fix="record processed ones (vLLM: logprobs_mode processed_logprobs), or drop"
            " --draft-sampling, because greedy proposals need none",
        )
    return manifest.temperature


def _proposed(
    drafts: Sequence[LoadedDraft],
    asked: ReplayQuestion,
    known: Sequence[Sequence[Proposals] | None],
    on_progress: Progress,
) -> Iterator[tuple[int, PromptTrace, list[Proposals]]]:
    traces, batches = asked.traces, asked.batches
    prompts = traces.manifest.prompts
    work = [work_of([prompts[i] for i in batch], asked.num_draft_tokens) for batch in batches]
    done, total = 0, sum(work) * sum(proposals is None for proposals in known)
    read = read_ahead(traces, batches, drafts[0].device)
    for positions, own_work, batch in zip(batches, work, read, strict=True):
        of_drafts = []
        for draft, proposals in zip(drafts, known, strict=True):
            if proposals is not None:
                of_drafts.append([proposals[position] for position in positions])
                continue
            of_drafts.append(asked.proposed_by(draft, batch))
            done += own_work
            on_progress(done, total)
        yield from zip(positions, batch, map(list, zip(*of_drafts, strict=True)), strict=True)


def _agreement(trace: PromptTrace, reference: Tensor, predicted: Tensor) -> Tensor:
    """[4] int64 in the order of the fields of FirstStepAgreement."""
    recorded = recorded_tokens(trace, predicted)[:, 0]
    first, this = reference[:, 0], predicted[:, 0]
    hit_first, hit_this = first == recorded, this == recorded
    rows = torch.tensor(len(this))
    return torch.stack(
        [rows, (first == this).sum(), (hit_first & ~hit_this).sum(), (hit_this & ~hit_first).sum()]
    )
