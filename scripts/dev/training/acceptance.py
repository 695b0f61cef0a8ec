"""Acceptance length of a draft on recorded greedy continuations, all rows at once.

Drafting is the project's own; steps and acceptance are counted without its replay, so that the
figures printed here check that counting.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .draft import Draft, predicted, scored_rows
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


def replay(draft: Draft, traces: Traces, *, num_draft_tokens: int) -> AcceptanceCounts:
    """Decode every trace speculatively and count what the target accepts.

    A chain's later steps matter only while its earlier tokens were right, that is, equal to the
    recorded ones; so feeding the recorded tokens gives exactly the tokens of a live chain. Steps
    too near the end of a trace to score in full are not counted.
    """
    proposals = draft.proposals(traces, num_draft_tokens)
    return counted(accepted_by_row(traces, proposals), num_draft_tokens=num_draft_tokens)


def counted(accepted: Tensor, *, num_draft_tokens: int) -> AcceptanceCounts:
    """Walk from step to step: the next one starts after the accepted tokens and the bonus token.

    Args:
        accepted: [N, R] of `accepted_by_row`.
    """
    num_steps = 0
    by_position = [0] * num_draft_tokens
    for of_trace in accepted.tolist():
        row = 0
        while row < len(of_trace):
            num_steps += 1
            for position in range(of_trace[row]):
                by_position[position] += 1
            row += of_trace[row] + 1
    return AcceptanceCounts(num_steps=num_steps, num_accepted_by_position=tuple(by_position))


def accepted_by_row(traces: Traces, proposals: Tensor) -> Tensor:
    """Draft tokens that the target would accept, if a step started at each row.

    Args:
        proposals: [N, R, K], what was drafted from each of `scored_rows`.

    Returns:
        [N, R] int64 in [0, K].
    """
    num_draft_tokens = proposals.shape[2]
    rows = scored_rows(traces, num_draft_tokens)
    recorded = [predicted(traces.token_ids, rows, depth) for depth in range(num_draft_tokens)]
    matches = proposals == torch.stack(recorded, dim=-1)
    return matches.long().cumprod(dim=-1).sum(dim=-1)
