"""Drafts that propose a whole block at once, from its anchor and the features before it.

Row t is the block whose anchor is token t + 1, at position t + 1, after the context of the features
of positions 0 .. t. Slot j of it (1-based; slot 0 is the anchor) predicts token t + 1 + j, at depth
j - 1. A live round reads the same anchor and the same context, so every block is one that an engine
would draft if a round began there.

The keys and values of the context do not depend on the block: they are computed once. Blocks are
evaluated a few at a time, so attention scores stay bounded however long the trace is.
"""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from ..forward import (
    BLOCK_ROWS,
    MAX_SCORES,
    Alive,
    Attend,
    DraftForward,
    DraftPass,
    finite,
    positions,
)


class BlockForward(DraftForward):
    """A draft that proposes a whole block at once."""

    @abstractmethod
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that a layer keeps of verified positions.

        Args:
            layer: which decoder layer of the draft.
            rows: [B, T, W] from `fuse`.
            positions: [T] int64.

        Returns:
            Rotated keys [B, KV, T, D] and values [B, KV, T, D].
        """

    @abstractmethod
    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Draft the tokens behind A anchors, each in a block of its own.

        Args:
            token_ids: [A, 1 + K] int64, target vocabulary: the last committed token of each block,
                its anchor, and the K tokens recorded behind it. A draft that chooses its tokens one
                after the other reads, for slot j, those before it: they are what it chose itself
                wherever slot j counts. Others read the anchor alone.
            positions: [A] int64, where the anchors stand.
            attend: gets the queries and keys of the blocks, [A, H, S, D] and [A, KV, S, D], for S
                slots: 1 + K, or K where the anchor's proposes the first token;
                adds the context before each anchor, under the mask of `visible`.

        Returns:
            [A, K, W'], for `logits`: entry j - 1 predicts the token at position anchor + j, from
            the hidden state of its slot and what else its proposal follows from.
        """

    @abstractmethod
    def visible(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys of the context before an anchor, and of its block, a slot of it looks at.

        Args:
            layer: which decoder layer of the draft.
            queries: positions of slots, int64.
            keys: positions of keys, int64, of a shape that broadcasts with that of `queries`.

        Returns:
            bool of the broadcast shape, True where the query looks at the key.
        """

    @override
    def passes(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        rows: range,
        num_draft_tokens: int,
        block_rows: int = BLOCK_ROWS,
        alive: Alive | None = None,
    ) -> Iterator[DraftPass]:
        num_context = rows[-1] + 1 if rows else 0
        attention = BlockAttention(self, hidden[:, :num_context])
        num_blocks = max(1, block_rows // (1 + num_draft_tokens))
        for i in range(0, len(rows), num_blocks):
            chosen = rows[i : i + num_blocks]
            anchors = range(chosen.start + 1, chosen.stop + 1, chosen.step)
            attention.begin(anchors)
            behind = token_ids.unfold(1, 1 + num_draft_tokens, 1)  # of every anchor: it, and K more
            ids = behind[:, anchors.start : anchors.stop : anchors.step]
            repeated = positions(anchors, hidden.device).repeat(len(ids))
            x = self.block(ids.flatten(0, 1), repeated, attention)
            where = f"draft blocks at positions {anchors[0]} to {anchors[-1]}"
            yield DraftPass(
                rows=chosen,
                depths=range(num_draft_tokens),
                where=where,
                hidden=(x if alive else finite(x, where)).view(*ids.shape[:2], *x.shape[1:]),
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
            q: [B, A, H, S, D].
            k: [B, A, KV, S, D].
            v: [B, A, KV, S, D'].

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
