"""Drafts that propose a chain: a step reads a token and the hidden state of the last step.

Row t pairs the hidden state of position t with token t + 1. At depth j (0-based) it reads token
t + 1 + j at position t + j, attends to the depth-0 rows up to t and to its own rows of depth
1 .. j, and predicts token t + 2 + j. A live chain feeds back its own tokens; those equal the
recorded ones for as long as every earlier depth was right, and only then does a later depth count.

Rows are evaluated in blocks, so attention scores stay bounded however long the trace is.

Where an earlier depth was wrong, a row need not be drafted deeper. No chain looks at another one's
deeper rows, so the linears multiply the rows that are left, of all sequences as one; attention, a
small share, sees them at their old places.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence

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

Keys = tuple[Tensor, Tensor]
"""Keys [B, KV, S, D] and values [B, KV, S, D'] of S rows."""


class ChainForward(DraftForward):
    """A draft that proposes a chain."""

    @abstractmethod
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step.

        Args:
            token_ids: [B, T] int64, target vocabulary.
            hidden: [B, T, W], from `fuse` at depth 1, from the step before after that.
            positions: [T] int64.

        Returns:
            Hidden states [B, T, W], for `logits` and for the next step.
        """

    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a step after the first reads, of the tokens and the hidden states before it.

        Args:
            token_ids: [B, T] int64, what the steps before proposed.
            hidden: [B, T, W] of the step before.

        Returns:
            Arguments of `step`, of the same shapes.
        """
        return token_ids, hidden

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
        num_rows = rows[-1] + 1 if rows else 0
        attention = ChainAttention(num_rows)

        def step(at: range, depth: int, x: Tensor, kept: Tensor | None) -> Tensor:
            attention.begin(at, depth, kept)
            read = range(at.start + depth, at.stop + depth, at.step)
            tokens = token_ids[:, read.start + 1 : read.stop + 1 : read.step]
            places = positions(read, x.device)
            if kept is not None:
                tokens, places = tokens.flatten()[kept][None], places[kept % len(at)]
            if depth > 0:
                tokens, x = self.later_input(tokens, x)
            x = self.step(tokens, x, places, attention)
            return x if alive else finite(x, _named(depth))

        for start in range(0, num_rows, block_rows):
            block = range(start, min(start + block_rows, num_rows))
            chains = rows[bisect_left(rows, block.start) : bisect_left(rows, block.stop)]
            kept: Tensor | None = None
            x = step(block, 0, hidden[:, block.start : block.stop], kept)
            x = x[:, chains.start - start : chains.stop - start : chains.step]
            for depth in range(num_draft_tokens if chains else 0):
                if depth > 0 and alive and (left := alive()) is not None:
                    x = x.flatten(0, 1)[left][None]
                    kept = left if kept is None else kept[left]
                if not x.shape[1]:
                    break
                if depth > 0:
                    x = step(chains, depth, x, kept)
                yield DraftPass(
                    rows=chains,
                    depths=range(depth, depth + 1),
                    where=_named(depth),
                    hidden=x[:, :, None],
                    kept=kept,
                )


def _named(depth: int) -> str:
    return f"draft step {depth + 1}"


class ChainAttention:
    """`Attend` of the chain: depth-0 keys of all rows so far, deeper keys of the current block.

    Args:
        window: see `_attend`.
    """

    def __init__(self, num_rows: int, window: int | None = None) -> None:
        self._num_rows = num_rows
        self._window = window
        self._context: dict[int, list[Keys]] = {}
        self._own: dict[int, list[Keys]] = {}
        self._rows, self._depth = range(0), 0
        self._kept: Tensor | None = None

    def begin(self, rows: range, depth: int, kept: Tensor | None = None) -> None:
        """Announce rows and depth of the next step, and which are left: see `DraftPass.kept`."""
        self._rows, self._depth, self._kept = rows, depth, kept
        if depth == 0:
            self._own = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the announced rows; those that are not left are zeros, and nobody's."""
        if self._kept is not None:
            q, k, v = (self._at_their_places(x, layer) for x in (q, k, v))
        known = self._context if self._depth == 0 else self._own
        known.setdefault(layer, []).append((k, v))
        context, own = self._context[layer], self._own.get(layer, [])
        most = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * self._num_rows))
        parts = []
        for i in range(0, q.shape[2], most):
            at = slice(i, i + most)
            chain = [(key[:, :, at], value[:, :, at]) for key, value in own]
            rows = self._rows[at]
            parts.append(_attend(q[:, :, at], context, chain, rows, scale, self._window))
        mixed = torch.cat(parts, dim=2)
        if self._kept is None:
            return mixed
        sequence, row = self._places()
        return mixed[sequence, :, row].transpose(0, 1)[None]

    def _at_their_places(self, x: Tensor, layer: int) -> Tensor:
        """[1, H, n, D] of the rows that are left -> [B, H, T, D]."""
        batch = self._context[layer][0][0].shape[0]
        placed = x.new_zeros((batch, x.shape[1], len(self._rows), x.shape[3]))
        sequence, row = self._places()
        placed[sequence, :, row] = x[0].transpose(0, 1)
        return placed

    def _places(self) -> tuple[Tensor, Tensor]:
        assert self._kept is not None  # or nobody asks
        return self._kept // len(self._rows), self._kept % len(self._rows)


def _attend(
    q: Tensor,
    context: Sequence[Keys],
    own: Sequence[Keys],
    rows: range,
    scale: float,
    window: int | None,
) -> Tensor:
    """Softmax over the context keys of rows <= t and the row's own chain keys, in float32 or wider.

    Args:
        q: [B, H, T, D] of `rows`.
        context: keys and values of the rows 0, 1, ..., block after block; `rows` lie in the last.
        own: per deeper step, keys and values of the T rows.
        rows: T rows.
        window: of the context only so many rows, t the last of them; None = all.

    Returns:
        [B, H, T, D'] in the dtype of q.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide)
    batch, heads, count = q.shape[:3]
    shared = context[0][0].shape[1]
    shape = (batch, shared, heads // shared, count)  # G = H / KV query heads share one key
    grouped = q.reshape(*shape, -1)
    flat = grouped.flatten(2, 3)
    before = sum(k.shape[2] for k, _ in context[:-1])
    last = [x[:, :, : rows[-1] + 1 - before] for x in context[-1]]
    blocks = [(k.to(wide), v.to(wide)) for k, v in [*context[:-1], (last[0], last[1])]]
    own = [(k.to(wide), v.to(wide)) for k, v in own]

    scores = [(flat @ k.mT).reshape(*shape, -1) * scale for k, _ in blocks]
    later = positions(range(before, rows[-1] + 1), q.device) > positions(rows, q.device)[:, None]
    scores[-1] = scores[-1].masked_fill(later, float("-inf"))
    if window is not None:
        scores = _within(scores, positions(rows, q.device)[:, None] - window)
    scores += [(grouped * k[:, :, None]).sum(-1, keepdim=True) * scale for k, _ in own]

    widths = [part.shape[-1] for part in scores]
    weights = torch.split(torch.cat(scores, dim=-1).softmax(-1), widths, dim=-1)
    mixed = _weighted(weights[0], blocks[0][1])
    for weight, (_, v) in zip(weights[1 : len(blocks)], blocks[1:], strict=True):
        mixed = mixed + _weighted(weight, v)
    for weight, (_, v) in zip(weights[len(blocks) :], own, strict=True):
        mixed = mixed + weight * v[:, :, None]
    return mixed.flatten(1, 2).to(dtype)


def _within(scores: Sequence[Tensor], last_unseen: Tensor) -> list[Tensor]:
    """Scores [B, KV, G, T, S] of blocks of keys, but for those up to row `last_unseen` [T, 1]."""
    masked, start = [], 0
    for block in scores:
        stop = start + block.shape[-1]
        keys = positions(range(start, stop), block.device)
        masked.append(block.masked_fill(keys <= last_unseen, float("-inf")))
        start = stop
    return masked


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """[B, KV, G, T, S] x [B, KV, S, D'] -> [B, KV, G, T, D']."""
    return (weights.flatten(2, 3) @ values).reshape(*weights.shape[:-1], -1)
