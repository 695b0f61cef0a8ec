"""What a draft proposes along one sequence, as tests ask for it."""

from draftquant.calibration.passes.proposals import Proposals, batch_proposals
from draftquant.quantize.drafts.forward import BLOCK_ROWS, DraftForward, whole_rows
from torch import Tensor


def draft_proposals(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    first_row: int,
    num_draft_tokens: int,
    temperature: float | None = None,
    block_rows: int = BLOCK_ROWS,
) -> Proposals:
    """What a draft proposes from R = max(0, N - 1 - K - first_row) rows along the recorded tokens.

    `hidden` [N - 1, W] are the draft's rows of the target's features, `token_ids` [N] int64.
    Without a temperature, above 0, its most likely tokens alone are asked for.
    """
    found = batch_proposals(
        forward,
        hidden[None],
        token_ids[None],
        rows=whole_rows(len(token_ids), num_draft_tokens, first_row=first_row),
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
        block_rows=block_rows,
    )
    return found.of_sequence(0, slice(None))
