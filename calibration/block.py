"""Teacher-forced blocks: one block per position of a trace, a few at a time.

Row t is the block whose anchor is token t + 1, at position t + 1, after the context of the features
of positions 0 .. t. Slot j of it (1-based; slot 0 is the anchor) predicts token t + 1 + j. A live
round reads the same anchor and the same context, so every block is one that an engine would draft
if a round began there.

The keys and values of the context do not depend on the block: they are computed once. Blocks are
evaluated a few at a time, so logits and attention scores stay bounded however long the trace is.
"""

import torch
from torch import Tensor

from ..quantize.drafts.forward import BlockForward
from .errors import CalibrationError

BLOCK_ROWS = 256
_MAX_SCORES = 2**24  # elements of one attention score matrix, all heads together: 64 MB in float32


@torch.inference_mode()
def block_predictions(
    forward: BlockForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    first_row: int,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """Draft `num_draft_tokens` tokens from every row whose whole block lies inside the trace.

    Args:
        forward: the draft.
        hidden: [N - 1, W], fused features, from position 0 on.
        token_ids: [N] int64.
        first_row: rows before it are context only.
        num_draft_tokens: mask tokens K behind every anchor, at least 1.
        block_rows: slots evaluated together, whole blocks; changes the result by rounding only.

    Returns:
        [R, K] int64 target-vocabulary ids: row i, column j is the draft's token for position
        first_row + i + 2 + j; R = max(0, N - 1 - K - first_row). The same as `chain_predictions`.

    Raises:
        CalibrationError: a logit is NaN or infinite.
    """
    num_rows = max(0, token_ids.shape[0] - 1 - num_draft_tokens)
    predicted = token_ids.new_empty((max(0, num_rows - first_row), num_draft_tokens))
    attention = BlockAttention(forward, hidden[:num_rows])
    num_blocks = max(1, block_rows // (1 + num_draft_tokens))
    for start in range(first_row, num_rows, num_blocks):
        stop = min(start + num_blocks, num_rows)
        anchors = torch.arange(start + 1, stop + 1)
        attention.begin(anchors)
        logits = forward.block(token_ids[anchors], anchors, num_draft_tokens, attention)
        if not bool(torch.isfinite(logits).all()):
            raise CalibrationError(
                f"draft blocks at positions {start + 1} to {stop}",
                "logits are NaN or infinite",
                fix="inspect the draft's weights and scales",
            )
        predicted[start - first_row : stop - first_row] = forward.to_target(logits.argmax(-1))
    return predicted


class BlockAttention:
    """`Attend` of blocks: the context before each anchor, and the block itself.

    Args:
        forward: the draft, for the keys and values of its context.
        rows: [C, W], fused features of the positions 0 .. C - 1.
    """

    def __init__(self, forward: BlockForward, rows: Tensor) -> None:
        self._forward = forward
        self._rows = rows
        self._positions = torch.arange(len(rows))
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchors = self._positions[:0]

    def begin(self, anchors: Tensor) -> None:
        """Announce the positions [A] of the next blocks' anchors, ascending."""
        self._anchors = anchors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the announced blocks; see `Attend`."""
        if layer not in self._context:
            self._context[layer] = self._forward.context(layer, self._rows[None], self._positions)
        heads, slots = q.shape[1:3]
        step = max(1, _MAX_SCORES // (heads * slots * (len(self._rows) + slots)))
        parts = (slice(i, i + step) for i in range(0, len(q), step))
        return torch.cat(
            [self._attend(layer, self._anchors[p], q[p], k[p], v[p], scale) for p in parts]
        )

    def _attend(
        self, layer: int, anchors: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """softmax([q K_context^T ; q K_block^T] * scale) [V_context ; V_block].

        Args:
            layer: whose context is read.
            anchors: [A].
            q: [A, H, S, D].
            k: [A, KV, S, D].
            v: [A, KV, S, D'].
            scale: multiplies the scores.

        Returns:
            [A, H, S, D'].
        """
        seen = int(anchors[-1])
        context_keys, context_values = (x[0, :, :seen] for x in self._context[layer])
        # G query heads share one of KV keys; the context is the same for all A blocks.
        shape = (k.shape[1], len(anchors), q.shape[1] // k.shape[1], q.shape[2])  # [KV, A, G, S]
        q = q.reshape(shape[1], shape[0], *shape[2:], -1).transpose(0, 1)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        to_context = (q.flatten(1, 3) @ context_keys.mT).reshape(*shape, -1)
        to_block = (q.flatten(2, 3) @ k.mT).reshape(*shape, -1)
        scores = torch.cat((to_context, to_block), dim=-1) * scale
        scores = scores.masked_fill_(~self._visible(layer, anchors, shape[3]), float("-inf"))
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(q.dtype)
        of_context = (weights[..., :seen].flatten(1, 3) @ context_values).reshape(*shape, -1)
        of_block = (weights[..., seen:].flatten(2, 3) @ v).reshape(*shape, -1)
        return (of_context + of_block).transpose(0, 1).flatten(1, 2)

    def _visible(self, layer: int, anchors: Tensor, num_slots: int) -> Tensor:
        """[A, 1, S, C + S] bool: context before the anchor, then the block, as the draft looks."""
        context = self._positions[: int(anchors[-1])].expand(len(anchors), -1)
        slots = anchors[:, None] + torch.arange(num_slots)
        keys = torch.cat((context, slots), dim=1)[:, None]
        known = torch.cat((context < anchors[:, None], slots >= anchors[:, None]), dim=1)[:, None]
        return (known & self._forward.visible(layer, slots[..., None], keys))[:, None]
