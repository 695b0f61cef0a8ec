"""The rounds of one recorded continuation: counted, or where a draft draws its tokens, expected.

A round with last committed token x_n belongs to row n - 1; x_n is also the anchor of a draft that
proposes blocks. The first is row P - 1 (x_P came from prefill), the next one is `accepted + 1` rows
later. A round is counted only if all K drafted positions lie inside the trace, so that its outcome
is fully known. Whether it is depends on its position alone, not on its outcome, so leaving the
others out biases nothing.

A proposal y ~ q is accepted with probability min(1, p(y) / q(y)), else the target emits from what
is left of p. So a token x is accepted and emitted with probability min(q(x), p(x)), and emitted
with p(x) in all: whatever was accepted before, emitted text has the law of the target, and given
the text, token x was an accepted proposal with probability

    c = min(1, q(x) / p(x)).

A text that the target wrote alone therefore says how many rounds a draft would have needed for it:
not which ones, but with which probability a round began at each row. That is an expectation, with
no random number drawn, and only p of the emitted tokens is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...calibration.passes.predictions import Proposals
from ...calibration.traces.prompt_trace import PromptTrace
from .acceptance_counts import AcceptanceCounts
from .context_bins import CONTEXT_BINS, ContextBins, ContextCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRounds:
    """The rounds of one prompt.

    Attributes:
        decoding: the rounds of decoding. contexts: the same by context bin.
        every_position: as if a round began at every position: see `PromptReplay`.
    """

    decoding: AcceptanceCounts
    contexts: ContextCounts
    every_position: AcceptanceCounts


def prompt_counts(
    trace: PromptTrace, proposed: Proposals, bins: ContextBins = CONTEXT_BINS
) -> CountedRounds:
    """Counted, or expected where the draft draws its tokens."""
    predicted, drafted = proposed.token_ids, proposed.recorded_logprobs
    first = trace.prompt_length + 1  # the token that came from prefill stands before round one too
    if drafted is None or trace.token_logprob is None:
        accepted = accepted_by_row(trace, predicted)
        depths, steps = predicted.shape[1], rounds(accepted)
        return CountedRounds(
            decoding=AcceptanceCounts.of(steps, depths),
            contexts=ContextCounts.of_steps(steps, first, depths, bins),
            every_position=AcceptanceCounts.of(accepted, depths),
        )
    target = _after_first(trace.token_logprob, predicted)
    outcomes = outcome_probabilities(acceptance_probabilities(drafted, target))
    begun = chances_of_beginning(outcomes)
    rows = bins.slices(first, len(outcomes))
    return CountedRounds(
        decoding=_expected(begun, outcomes),
        contexts=ContextCounts(
            bins=bins, counts=tuple(_expected(begun[own], outcomes[own]) for own in rows)
        ),
        every_position=rounds_at_every_row(outcomes),
    )


def shorter_counts(trace: PromptTrace, proposed: Proposals) -> tuple[AcceptanceCounts, ...]:
    """[K - 1] the rounds of decoding where only the first 1, 2, .. K - 1 proposals are verified.

    The next round then begins elsewhere, so that these are no sums of the counts at K. A chain
    proposes the same tokens whatever K is: of it they are a replay at that K, but for the rounds
    at the end of the text, of which K tokens are looked at here too. A block that is drafted whole
    and cut is what vLLM's schedule by batch size makes of it.
    """
    predicted, drafted = proposed.token_ids, proposed.recorded_logprobs
    depths = range(1, predicted.shape[1])
    if drafted is None or trace.token_logprob is None:
        accepted = accepted_by_row(trace, predicted)
        cut = ([min(length, depth) for length in accepted] for depth in depths)
        return tuple(
            AcceptanceCounts.of(rounds(lengths), depth)
            for depth, lengths in zip(depths, cut, strict=True)
        )
    target = _after_first(trace.token_logprob, predicted)
    likely = acceptance_probabilities(drafted, target)
    return tuple(expected_rounds(outcome_probabilities(likely[:, :depth])) for depth in depths)


def accepted_by_row(trace: PromptTrace, predicted: Tensor) -> list[int]:
    """Draft tokens accepted if a round started at each row from P - 1 on.

    Args:
        trace: N tokens, P of them the prompt.
        predicted: [R, K] drafted tokens of those rows, target vocabulary.

    Returns:
        R numbers in [0, K]: the length of the common prefix of drafted and recorded tokens.
    """
    hits = predicted == recorded_tokens(trace, predicted)
    lengths: list[int] = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    return lengths


def rounds(accepted: Sequence[int]) -> list[int]:
    """The rounds of decoding: accepted tokens of row 0, of the row `accepted + 1` later, ..."""
    steps, row = [], 0
    while row < len(accepted):
        steps.append(accepted[row])
        row += accepted[row] + 1
    return steps


def recorded_tokens(trace: PromptTrace, predicted: Tensor) -> Tensor:
    """[R, K] the tokens that the rows predict: entry (i, j) is token P + 1 + i + j."""
    return _after_first(trace.token_ids[trace.prompt_length :], predicted)


def _after_first(continued: Tensor, predicted: Tensor) -> Tensor:
    """[R, K] of what is known of each token of the continuation, for the rows that predict it."""
    rows, depths = predicted.shape
    return continued[1:].unfold(0, depths, 1)[:rows] if rows else continued.new_empty((0, depths))


def acceptance_probabilities(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """The c = min(1, q / p) of recorded tokens, given all before them in the round were accepted.

    Args:
        draft_logprobs: [R, K] log q of the token that row r predicts at depth j, -infinity where
            the draft cannot propose it.
        target_logprobs: [R, K] log p of the same tokens, finite.

    Returns:
        [R, K] float64 in [0, 1].
    """
    return (draft_logprobs.double() - target_logprobs.double()).clamp(max=0).exp()


def outcome_probabilities(accepted: Tensor) -> Tensor:
    """Probability that a round at each row accepts exactly 0, 1, .. K tokens.

    Args:
        accepted: [R, K], see `acceptance_probabilities`.

    Returns:
        [R, K + 1] float64, each row summing to 1: prod_{i<j} c_i * (1 - c_j), and prod c_i.
    """
    ones = accepted.new_ones((len(accepted), 1))
    reached = torch.cat([ones, accepted.cumprod(dim=1)], dim=1)
    return torch.cat([reached[:, :-1] * (1 - accepted), reached[:, -1:]], dim=1)


def expected_rounds(outcomes: Tensor) -> AcceptanceCounts:
    """Expected number of rounds by what they accept, if the first begins at row 0.

    Args:
        outcomes: [R, K + 1], see `outcome_probabilities`.
    """
    return _expected(chances_of_beginning(outcomes), outcomes)


def chances_of_beginning(outcomes: Tensor) -> Tensor:
    """[R] probability that a round begins at each row, if the first begins at row 0.

    A round that begins at row r and accepts j tokens is followed by one at row r + j + 1; so the
    probability pi is found from the first row to the last.

    Args:
        outcomes: [R, K + 1], see `outcome_probabilities`.
    """
    begins = [1.0] + [0.0] * (len(outcomes) + outcomes.shape[1])
    for row, probabilities in enumerate(outcomes.tolist()):
        for accepted, probability in enumerate(probabilities):
            begins[row + accepted + 1] += begins[row] * probability
    return outcomes.new_tensor(begins[: len(outcomes)])


def _expected(begun: Tensor, outcomes: Tensor) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=tuple((begun @ outcomes).tolist()))


def rounds_at_every_row(outcomes: Tensor) -> AcceptanceCounts:
    """The same as if a round began at every row."""
    return AcceptanceCounts(histogram=tuple(outcomes.sum(dim=0).tolist()))
