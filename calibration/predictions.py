"""What a draft of either kind proposes along a trace, and how many tokens it can propose."""

from torch import Tensor

from ..quantize.drafts.family import Geometry
from ..quantize.drafts.forward import BlockForward, ChainForward, DraftForward
from .block import block_predictions
from .chain import chain_predictions


def draft_predictions(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    first_row: int,
    num_draft_tokens: int,
) -> Tensor:
    """`chain_predictions` or `block_predictions`, whichever the draft does.

    Args:
        forward: the draft.
        hidden: [N - 1, W], the draft's rows of the target's features, from position 0 on.
        token_ids: [N] int64.
        first_row: rows before it are context only.
        num_draft_tokens: K, one that `num_draft_tokens_fault` finds nothing wrong with.

    Returns:
        [R, K] int64 target-vocabulary ids: row i, column j is the draft's token for position
        first_row + i + 2 + j; R = max(0, N - 1 - K - first_row).

    Raises:
        CalibrationError: the draft computes NaN or infinity.
    """
    if isinstance(forward, BlockForward):
        return block_predictions(
            forward, hidden, token_ids, first_row=first_row, num_draft_tokens=num_draft_tokens
        )
    if isinstance(forward, ChainForward):
        return chain_predictions(
            forward, hidden, token_ids, first_row=first_row, num_draft_tokens=num_draft_tokens
        )
    raise TypeError(f"{type(forward).__name__} proposes neither a chain nor a block")


def num_draft_tokens_fault(geometry: Geometry, num_draft_tokens: int) -> tuple[str, str] | None:
    """What is wrong with a number of draft tokens for this draft, and how to put it right.

    A block holds an anchor and at most `block_size` - 1 masks; fewer masks make a shorter block, as
    vLLM 0.33 and SGLang 0.5.23 do when they are asked for fewer draft tokens.
    """
    if num_draft_tokens < 1:
        return f"expected at least 1, got {num_draft_tokens}", "give the number that will be served"
    size = geometry.block_size
    if size is not None and num_draft_tokens >= size:
        return (
            f"expected at most {size - 1}, got {num_draft_tokens}: the draft fills blocks of {size}"
            " tokens, and the first of them is given",
            f"give {size - 1} or less, as it will be served",
        )
    return None
