"""Acceptance length of a draft on recorded greedy continuations, all rows at once.

Written without the project's own replay, so that the figures it prints check that replay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .draft import Draft, predicted, rows
from .target import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """Counts over decode steps, pooled over prompts.

    Attributes:
        num_steps: verify steps.
        num_accepted_by_position: steps that accepted the first, second, ... draft token.
    """

    num_steps: int
    num_accepted_by_position: tuple[int, ...]

    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens per step: the bonus token counts, in [1, K + 1]."""
        return 1 + sum(self.num_accepted_by_position) / self.num_steps

    def acceptance_rate_by_position(self) -> tuple[float, ...]:
        """Share of all steps that accepted the draft token at each position."""
        return tuple(accepted / self.num_steps for accepted in self.num_accepted_by_position)


@torch.no_grad()
def replay(
    draft: Draft, traces: Traces, *, num_draft_tokens: int, batch_size: int = 32
) -> AcceptanceCounts:
    """Decode every trace speculatively and count what the target accepts.

    A chain's later steps matter only while its earlier tokens were right, that is, equal to the
    recorded ones; so feeding the recorded tokens gives exactly the tokens of a live chain.

    Args:
        draft: the draft to score.
        traces: greedy continuations of the target.
        num_draft_tokens: tokens proposed per step, K.
        batch_size: traces scored together.

    Returns:
        Pooled counts; steps too near the end of a trace to score in full are not counted.
    """
    num_steps = 0
    num_accepted = torch.zeros(num_draft_tokens, dtype=torch.int64)
    for batch_ids in torch.split(torch.arange(len(traces.token_ids)), batch_size):
        for accepted in accepted_by_row(draft, traces[batch_ids], num_draft_tokens).tolist():
            row = 0
            while row < len(accepted):
                num_steps += 1
                num_accepted[: accepted[row]] += 1
                row += accepted[row] + 1
    return AcceptanceCounts(
        num_steps=num_steps, num_accepted_by_position=tuple(num_accepted.tolist())
    )


def accepted_by_row(draft: Draft, traces: Traces, num_draft_tokens: int) -> Tensor:
    """Draft tokens that the target would accept, if a step started at each row.

    Returns:
        [N, R] int64 in [0, num_draft_tokens].
    """
    chain_rows = rows(traces, num_draft_tokens)
    matches = [
        logits.argmax(dim=-1) == predicted(traces.token_ids, chain_rows, depth)
        for depth, logits in enumerate(draft.chain_logits(traces, chain_rows, num_draft_tokens))
    ]
    return torch.stack(matches, dim=-1).long().cumprod(dim=-1).sum(dim=-1)


def repeated_ngram_share(continuations: Tensor, *, order: int = 8) -> float:
    """Share of n-grams that already occurred earlier in the same continuation.

    A small target's greedy text likes to loop, and loops are easy to draft.

    Args:
        continuations: [N, num_new_tokens] int64, without the prompts.
        order: tokens per n-gram.

    Returns:
        Pooled over all continuations, in [0, 1).
    """
    num_ngrams = num_distinct = 0
    for continuation in continuations.unfold(1, order, 1).tolist():
        num_ngrams += len(continuation)
        num_distinct += len({tuple(ngram) for ngram in continuation})
    return 1 - num_distinct / num_ngrams
