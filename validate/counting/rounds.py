"""The rounds of one recorded continuation: counted, or where a draft draws its tokens, expected.

A round with last committed token x_n belongs to row n - 1; x_n is also the anchor of a draft that
proposes blocks. The first is row P - 1 (x_P came from prefill), the next one is `accepted + 1` rows
later. A round is counted only if all K drafted positions lie inside the trace, so that its outcome
is fully known. Whether it is depends on its position alone, not on its outcome, so leaving the
others out biases nothing.
"""

from collections.abc import Sequence

from torch import Tensor

from ...calibration.passes.predictions import Proposals
from ...calibration.traces.prompt_trace import PromptTrace
from .acceptance_counts import AcceptanceCounts
from .expectation import (
    acceptance_probabilities,
    expected_rounds,
    outcome_probabilities,
    rounds_at_every_row,
)


def prompt_counts(
    trace: PromptTrace, proposed: Proposals
) -> tuple[AcceptanceCounts, AcceptanceCounts]:
    """Of the rounds of decoding, and as if one began at every position: see `PromptReplay`."""
    predicted, drafted = proposed.token_ids, proposed.recorded_logprobs
    if drafted is None or trace.token_logprob is None:
        accepted = accepted_by_row(trace, predicted)
        depths = predicted.shape[1]
        return _histogram(rounds(accepted), depths), _histogram(accepted, depths)
    target = _after_first(trace.token_logprob, predicted)
    outcomes = outcome_probabilities(acceptance_probabilities(drafted, target))
    return expected_rounds(outcomes), rounds_at_every_row(outcomes)


def _histogram(accepted: Sequence[int], num_draft_tokens: int) -> AcceptanceCounts:
    return AcceptanceCounts(histogram=tuple(accepted.count(j) for j in range(num_draft_tokens + 1)))


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
