"""Teacher-forced blocks: one block per position of a trace, a few at a time.

Row t is the block whose anchor is token t + 1, at position t + 1, after the context of the features
of positions 0 .. t. Slot j of it (1-based; slot 0 is the anchor) predicts token t + 1 + j, at depth
j - 1. A live round reads the same anchor and the same context, so every block is one that an engine
would draft if a round began there.

The keys and values of the context do not depend on the block: they are computed once. Blocks are
evaluated a few at a time, so attention scores stay bounded however long the trace is. Nothing is
written in place that a gradient needs: the passes may be differentiated as they are.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...quantize.drafts.forward import BlockForward
from .draft_pass import BLOCK_ROWS, MAX_SCORES, DraftPass, finite, positions


def block_passes(
    forward: BlockForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[DraftPass]:
    """Run the blocks of some rows, a few at a time.

    Args:
        forward: the draft.
        hidden: [B, N - 1, W], fused features, from position 0 on.
        token_ids: [B, N] int64. Nothing looks ahead, so shorter sequences may be padded behind.
        rows: whose blocks are drafted; other rows are context only.
        num_draft_tokens: mask tokens K behind every anchor, at least 1.
        block_rows: slots evaluated together, whole blocks; changes the result by rounding only.

    Yields:
        All depths of some rows.

    Raises:
        CalibrationError: a hidden state is NaN or infinite.
    """
    num_context = rows[-1] + 1 if rows else 0
    attention = BlockAttention(forward, hidden[:, :num_context])
    num_blocks = max(1, block_rows // (1 + num_draft_tokens))
    for i in range(0, len(rows), num_blocks):
        chosen = rows[i : i + num_blocks]
        anchors = range(chosen.start + 1, chosen.stop + 1, chosen.step)
        attention.begin(anchors)
        behind = token_ids.unfold(1, 1 + num_draft_tokens, 1)  # of every anchor: it, and K more
        ids = behind[:, anchors.start : anchors.stop : anchors.step]
        repeated = positions(anchors, hidden.device).repeat(len(ids))
        x = forward.block(ids.flatten(0, 1), repeated, attention)
        where = f"draft blocks at positions {anchors[0]} to {anchors[-1]}"
        yield DraftPass(
            rows=chosen,
            depths=range(num_draft_tokens),
            hidden=finite(x, where, "hidden states").view(*ids.shape[:2], *x.shape[1:]),
        )


class BlockAttention:
    """`Attend` of blocks: the context before each anchor, and the block itself.

    Args:
        forward: the draft, for the keys and values of its context.
        rows: [B, C, W], fused features of the positions 0 .. C - 1 of B sequences.
    """

    def __init__(self, forward: BlockForward, rows: Tensor) -> None:
        self._forward = forward
        self._rows = rows
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchors = range(0)

    def begin(self, anchors: range) -> None:
        """Announce the positions of the next blocks' anchors, the same A in each sequence."""
        self._anchors = anchors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the announced blocks, [B * A, ...], sequence by sequence; see `Attend`."""
        batch, num_context = self._rows.shape[:2]
        if layer not in self._context:
            every = positions(range(num_context), self._rows.device)
            self._context[layer] = self._forward.context(layer, self._rows, every)
        heads, slots = q.shape[1:3]
        step = max(1, MAX_SCORES // (batch * heads * slots * (num_context + slots)))
        q, k, v = (x.reshape(batch, -1, *x.shape[1:]) for x in (q, k, v))
        parts = (slice(i, i + step) for i in range(0, q.shape[1], step))
        mixed = [
            self._attend(layer, self._anchors[p], q[:, p], k[:, p], v[:, p], scale) for p in parts
        ]
        return torch.cat(mixed, dim=1).flatten(0, 1)

    def _attend(
        self, layer: int, anchors: range, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """softmax([q K_context^T ; q K_block^T] * scale) [V_context ; V_block], float32 or wider.

        Args:
            layer: whose context is read.
            anchors: A positions.
            q: [B, A, H, S, D].
            k: [B, A, KV, S, D].
            v: [B, A, KV, S, D'].
            scale: multiplies the scores.

        Returns:
            [B, A, H, S, D'] in the dtype of q.
        """
        dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        seen = anchors[-1]
        context_keys, context_values = (x[:, :, :seen].to(wide) for x in self._context[layer])
        # G query heads share one of KV keys; the context is the same for all A blocks.
        q = q.reshape(*k.shape[:3], -1, *q.shape[3:]).transpose(1, 2)  # [B, KV, A, G, S, D]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        shape = q.shape[:-1]
        to_context = (q.flatten(2, 4) @ context_keys.mT).reshape(*shape, -1)
        to_block = (q.flatten(3, 4) @ k.mT).reshape(*shape, -1)
        scores = torch.cat((to_context, to_block), dim=-1) * scale
        visible = self._visible(layer, positions(anchors, q.device), shape[-1], seen)
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1)
        of_context = (weights[..., :seen].flatten(2, 4) @ context_values).reshape(*shape, -1)
        of_block = (weights[..., seen:].flatten(3, 4) @ v).reshape(*shape, -1)
        return (of_context + of_block).transpose(1, 2).flatten(2, 3).to(dtype)

    def _visible(self, layer: int, anchors: Tensor, num_slots: int, seen: int) -> Tensor:
        """[A, 1, S, C + S] bool: context before the anchor, then the block, as the draft looks."""
        context = positions(range(seen), anchors.device).expand(len(anchors), -1)
        slots = anchors[:, None] + positions(range(num_slots), anchors.device)
        keys = torch.cat((context, slots), dim=1)[:, None]
        known = torch.cat((context < anchors[:, None], slots >= anchors[:, None]), dim=1)[:, None]
        return (known & self._forward.visible(layer, slots[..., None], keys))[:, None]
