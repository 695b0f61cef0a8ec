"""What a draft of either kind computes and proposes along a trace, and how much it can propose."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..quantize.drafts.family import Geometry
from ..quantize.drafts.forward import BlockForward, ChainForward, DraftForward
from .block import block_passes
from .chain import chain_passes
from .passes import BLOCK_ROWS, DraftPass, finite, whole_rows

MAX_LOGITS = 2**26
"""Elements of the logits of one part of the rows: 256 MB in float32."""


def draft_passes(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[DraftPass]:
    """`chain_passes` or `block_passes`, whichever the draft does.

    With gradients enabled every pass keeps its graph, and the graphs of all passes share the keys
    of the context: add up a loss over the passes, then go backward once. Without, memory is that of
    one pass and of the keys so far.

    Args:
        forward: the draft, over weights on any device, some of which may require gradients.
        hidden: [B, N - 1, W], the draft's rows of the target's features, from position 0 on.
        token_ids: [B, N] int64. Nothing looks ahead, so shorter sequences may be padded behind.
        rows: whose chains or blocks are drafted, evenly spaced, each with all its K predictions
            inside the trace (`whole_rows`); other rows are context only.
        num_draft_tokens: K, one that `num_draft_tokens_fault` finds nothing wrong with.
        block_rows: rows (of a block draft, slots) of each sequence evaluated together; changes the
            result by rounding only.

    Returns:
        Passes that together hold every one of `rows` at every depth 0 .. K - 1 once.

    Raises:
        CalibrationError: the draft computes NaN or infinity.
    """
    if isinstance(forward, BlockForward):
        return block_passes(
            forward,
            hidden,
            token_ids,
            rows=rows,
            num_draft_tokens=num_draft_tokens,
            block_rows=block_rows,
        )
    if isinstance(forward, ChainForward):
        return chain_passes(
            forward,
            hidden,
            token_ids,
            rows=rows,
            num_draft_tokens=num_draft_tokens,
            block_rows=block_rows,
        )
    raise TypeError(f"{type(forward).__name__} proposes neither a chain nor a block")


@torch.inference_mode()
def draft_predictions(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    first_row: int,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """The tokens that a draft proposes from every row: the argmax of `draft_passes`.

    Args:
        forward: the draft.
        hidden: [N - 1, W], the draft's rows of the target's features, from position 0 on.
        token_ids: [N] int64.
        first_row: rows before it are context only.
        num_draft_tokens: K, one that `num_draft_tokens_fault` finds nothing wrong with.
        block_rows: see `draft_passes`.

    Returns:
        [R, K] int64 target-vocabulary ids: row i, column j is the draft's token for position
        first_row + i + 2 + j; R = max(0, N - 1 - K - first_row).

    Raises:
        CalibrationError: the draft computes NaN or infinity.
    """
    return batch_predictions(
        forward,
        hidden[None],
        token_ids[None],
        rows=whole_rows(len(token_ids), num_draft_tokens, first_row=first_row),
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
    )[0]


@torch.inference_mode()
def batch_predictions(
    forward: DraftForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """`draft_predictions` of several sequences, of the same rows of each.

    Args:
        forward: the draft.
        hidden: [B, N - 1, W].
        token_ids: [B, N] int64. Nothing looks ahead, so shorter sequences may be padded behind.
        rows: consecutive ones, each with all its predictions inside the N tokens.
        num_draft_tokens: K.
        block_rows: see `draft_passes`.

    Returns:
        [B, len(rows), K] int64 target-vocabulary ids.

    Raises:
        CalibrationError: the draft computes NaN or infinity.
    """
    predicted = token_ids.new_empty((len(token_ids), len(rows), num_draft_tokens))
    for one in draft_passes(
        forward,
        hidden,
        token_ids,
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
    ):
        at = slice(one.rows.start - rows.start, one.rows.stop - rows.start)
        predicted[:, at, one.depths.start : one.depths.stop] = _argmax(forward, one)
    return predicted


def _argmax(forward: DraftForward, one: DraftPass) -> Tensor:
    """[B, R, D] target-vocabulary ids; NaN and infinity are maximal, and refused."""
    flat, where = one.hidden.flatten(0, -2), f"draft rows {one.rows[0]} to {one.rows[-1]}"
    found = []
    for some in logit_rows(forward, flat):
        best, draft_ids = forward.logits(some).max(-1)
        finite(best, where, "logits")
        found.append(forward.to_target(draft_ids))
    return torch.cat(found).view(one.hidden.shape[:-1])


def logit_rows(forward: DraftForward, hidden: Tensor) -> tuple[Tensor, ...]:
    """Hidden states [rows, W], split so that the logits of one part fit in memory."""
    return hidden.split(max(1, MAX_LOGITS // forward.num_logits))


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
