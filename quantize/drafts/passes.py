"""The passes of drafts along recorded tokens: chains, chains of several modules, texts, blocks.

A chain's row t pairs the hidden state of position t with token t + 1. At depth j (0-based) it reads
token t + 1 + j at position t + j, attends to the depth-0 rows up to t and to its own rows of depth
1 .. j, and predicts token t + 2 + j. A live chain feeds back its own tokens; those equal the
recorded ones for as long as every earlier depth was right, and only then does a later depth count.
No chain looks at another one's deeper rows, so the linears multiply the remaining rows of all
sequences at once; attention sees them at their old places.

A block's row t has its anchor at token t + 1, at position t + 1, after the context of the features
of positions 0 .. t, whose keys and values are computed once. Slot j of it (1-based; slot 0 is the
anchor) predicts token t + 1 + j, at depth j - 1. So every block is one that an engine would draft
if a step began there.

Rows and blocks are evaluated a few at a time, so attention scores stay bounded for any length of
trace.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from typing_extensions import override

from .forward import MAX_SCORES, Attend, DraftForward, Drafting, DraftPass, OnCache, positions
from .maths import Tensor, torch

Keys = tuple[Tensor, Tensor]
"""Keys [B, KV, S, D] and values [B, KV, S, D'] of S rows."""


class ChainForward(DraftForward):
    """A draft that proposes a chain."""

    @abstractmethod
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step: hidden states [B, T, W] for `logits` and for the next step.

        Takes hidden states [B, T, W], at depth 1 those of `fuse`, and positions [T] int64.
        """

    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a step after the first reads, from the tokens and hidden states before it."""
        return token_ids, hidden

    @override
    def drafted(self, asked: Drafting) -> Iterator[DraftPass]:
        indexer = self.geometry.indexer
        attention = ChainAttention(
            asked.num_rows, sees_chain=indexer is None or not indexer.chooses_once
        )
        alive = asked.alive

        def step(at: range, depth: int, x: Tensor, kept: Tensor | None) -> Tensor:
            attention.begin(at, depth, kept)
            read = range(at.start + depth, at.stop + depth, at.step)
            tokens = asked.token_ids[:, read.start + 1 : read.stop + 1 : read.step]
            places = positions(read, x.device)
            if kept is not None:
                tokens, places = tokens.flatten()[kept][None], places[kept % len(at)]
            if depth > 0:
                tokens, x = self.later_input(tokens, x)
            x = self.step(tokens, x, places, attention)
            return asked.checked(x, _named(depth))

        for block, chains in asked.blocks():
            kept: Tensor | None = None
            x = step(block, 0, asked.hidden[:, block.start : block.stop], kept)
            x = x[:, chains.start - block.start : chains.stop - block.start : chains.step]
            for depth in range(asked.num_draft_tokens if chains else 0):
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

    Only `window` rows of the context are seen, the last of them row t; None = all. Deeper rows are
    not seen unless `sees_chain`.
    """

    def __init__(
        self, num_rows: int, window: int | None = None, *, sees_chain: bool = True
    ) -> None:
        self._num_rows = num_rows
        self._window = window
        self._sees_chain = sees_chain
        self._context: dict[int, list[Keys]] = {}
        self._own: dict[int, list[Keys]] = {}
        self._rows, self._depth = range(0), 0
        self._kept: Tensor | None = None

    def begin(self, rows: range, depth: int, kept: Tensor | None = None) -> None:
        """Announce rows and depth of the next step, and the remaining rows: `DraftPass.kept`."""
        self._rows, self._depth, self._kept = rows, depth, kept
        if depth == 0:
            self._own = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the announced rows; rows that do not remain are zeros, and never read."""
        if self._kept is not None:
            q, k, v = (self._at_their_places(x, layer) for x in (q, k, v))
        known = self._context if self._depth == 0 else self._own
        if self._depth == 0 or self._sees_chain:
            known.setdefault(layer, []).append((k, v))
        context, chained = self._context[layer], self._own.get(layer, [])
        most = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * self._num_rows))
        parts = []
        for i in range(0, q.shape[2], most):
            at = slice(i, i + most)
            chain = [(key[:, :, at], value[:, :, at]) for key, value in chained]
            rows = self._rows[at]
            parts.append(_attend(q[:, :, at], context, chain, rows, scale, self._window))
        mixed = torch.cat(parts, dim=2)
        if self._kept is None:
            return mixed
        sequence, row = self._places()
        return mixed[sequence, :, row].transpose(0, 1)[None]

    def _at_their_places(self, x: Tensor, layer: int) -> Tensor:
        """[1, H, n, D] of the remaining rows -> [B, H, T, D]."""
        batch = self._context[layer][0][0].shape[0]
        placed = x.new_zeros((batch, x.shape[1], len(self._rows), x.shape[3]))
        sequence, row = self._places()
        placed[sequence, :, row] = x[0].transpose(0, 1)
        return placed

    def _places(self) -> tuple[Tensor, Tensor]:
        assert self._kept is not None  # otherwise nobody calls this
        return self._kept // len(self._rows), self._kept % len(self._rows)


def _attend(
    q: Tensor,
    context: Sequence[Keys],
    chain: Sequence[Keys],
    rows: range,
    scale: float,
    window: int | None,
) -> Tensor:
    """Softmax over the context keys of rows <= t and the row's own chain keys, in float32 or wider.

    For q [B, H, T, D]; the context's keys are those of the rows 0, 1, ..., block after block; the
    last block holds `rows`; `chain` are the keys of the T rows, per deeper step.
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
    chain = [(k.to(wide), v.to(wide)) for k, v in chain]

    scores = [(flat @ k.mT).reshape(*shape, -1) * scale for k, _ in blocks]
    later = positions(range(before, rows[-1] + 1), q.device) > positions(rows, q.device)[:, None]
    scores[-1] = scores[-1].masked_fill(later, float("-inf"))
    if window is not None:
        scores = _within(scores, positions(rows, q.device)[:, None] - window)
    scores += [(grouped * k[:, :, None]).sum(-1, keepdim=True) * scale for k, _ in chain]

    widths = [part.shape[-1] for part in scores]
    weights = torch.split(torch.cat(scores, dim=-1).softmax(-1), widths, dim=-1)
    mixed = _weighted(weights[0], blocks[0][1])
    for weight, (_, v) in zip(weights[1 : len(blocks)], blocks[1:], strict=True):
        mixed = mixed + _weighted(weight, v)
    for weight, (_, v) in zip(weights[len(blocks) :], chain, strict=True):
        mixed = mixed + weight * v[:, :, None]
    return mixed.flatten(1, 2).to(dtype)


def _within(scores: Sequence[Tensor], last_unseen: Tensor) -> list[Tensor]:
    """Scores [B, KV, G, T, S] of blocks of keys, without those up to row `last_unseen` [T, 1]."""
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


class StagedForward(DraftForward):
    """A draft of several modules, each one step of a chain: module i drafts token i + 1.

    At depth i row t reads token t + 1 + i and module i - 1's output at row t, at position t, and
    sees earlier rows as module i itself saw them. Hidden states for `logits` have the
    module's number appended.

    Rows before a step's last one read at depth i, as vLLM 0.33 serves it, the tokens that
    were accepted (`v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py:596`), so the recorded
    tokens give the same keys.
    """

    modules: Sequence[ChainForward]
    window: int | None = None
    """Rows that a query sees, including its own; None = all before it."""

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        # [..., W + 1], all of one module.
        return self._of(hidden).logits(hidden[..., :-1])

    @override
    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        return self._of(hidden).largest_logits(hidden[..., :-1], most)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self._of(hidden).head_input(hidden[..., :-1])

    @override
    def caching(self, on_cache: OnCache) -> Self:
        # For every module, each of which is a layer with its own number.
        forward = super().caching(on_cache)
        forward.modules = [module.caching(on_cache) for module in self.modules]
        return forward

    def _of(self, hidden: Tensor) -> ChainForward:
        return self.modules[int(hidden[..., -1].flatten()[0])]

    @override
    def drafted(self, asked: Drafting) -> Iterator[DraftPass]:
        attentions = [
            ChainAttention(asked.num_rows, self.window) for _ in range(asked.num_draft_tokens)
        ]
        for block, drafting in asked.blocks():
            start = block.start
            part = slice(drafting.start - start, drafting.stop - start, drafting.step)
            x = asked.hidden[:, start : block.stop]
            for depth, attention in enumerate(attentions):
                tokens = asked.token_ids[:, start + 1 + depth : block.stop + 1 + depth]
                attention.begin(block, 0)
                x = self.modules[depth].step(tokens, x, positions(block, x.device), attention)
                x = asked.checked(x, where := _named(depth))
                if drafting:
                    given = x[:, part]
                    number = torch.full_like(given[..., :1], depth)
                    out = torch.cat((given, number), dim=-1)[:, :, None]
                    at = range(depth, depth + 1)
                    yield DraftPass(rows=drafting, depths=at, where=where, hidden=out)


class TextForward(ChainForward):
    """A chain that reads only the text: `step` reads a token at the token's own position.

    No row of a chain reads token 0. With one row put before the others, row t + 1 of the longer
    chain is what all other drafts call row t. Hidden states given to `step` are not
    read.
    """

    @override
    def drafted(self, asked: Drafting) -> Iterator[DraftPass]:
        ids = asked.token_ids
        before = torch.cat((ids[:, :1], ids), dim=1)  # the first of them is never read
        nothing = ids.new_empty((*ids.shape, 0))
        longer = replace(asked, hidden=nothing, token_ids=before, rows=_moved(asked.rows, 1))
        for drafted in super().drafted(longer):
            yield replace(drafted, rows=_moved(drafted.rows, -1))


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)


class BlockForward(DraftForward):
    """A draft that proposes a whole block at once."""

    @abstractmethod
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [B, KV, T, D], of rows [B, T, W] at positions [T]."""

    @abstractmethod
    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Draft the tokens after A anchors, each in a block of its own.

        Args:
            token_ids: [A, 1 + K] int64, target vocabulary: the last committed token of each block,
                its anchor, and the K tokens recorded after it. A draft that chooses its tokens one
                after the other reads, for slot j, those before it: they equal its own choices
                wherever slot j counts. Other drafts read only the anchor.
            positions: [A] int64, where the anchors stand.
            attend: gets queries and keys of S slots: 1 + K, or K where the anchor's proposes the
                first token; adds the context before each anchor, under the mask of `visible`.

        Returns:
            [A, K, W'], for `logits`: entry j - 1 predicts the token at position anchor + j.
        """

    @abstractmethod
    def visible(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys a slot sees, bool: positions of both are int64 and broadcast."""

    @abstractmethod
    def sinks(self, layer: int) -> Tensor | None:
        """The logit [H] of each head that is no key's, beside its scores in the softmax."""

    @override
    def drafted(self, asked: Drafting) -> Iterator[DraftPass]:
        hidden, slots = asked.hidden, 1 + asked.num_draft_tokens
        attention = BlockAttention(self, hidden[:, : asked.num_rows])
        num_blocks = max(1, asked.block_rows // slots)
        for i in range(0, len(asked.rows), num_blocks):
            chosen = asked.rows[i : i + num_blocks]
            anchors = range(chosen.start + 1, chosen.stop + 1, chosen.step)
            attention.begin(anchors)
            behind = asked.token_ids.unfold(1, slots, 1)  # each anchor, and K more
            ids = behind[:, anchors.start : anchors.stop : anchors.step]
            repeated = positions(anchors, hidden.device).repeat(len(ids))
            x = self.block(ids.flatten(0, 1), repeated, attention)
            where = f"draft blocks at positions {anchors[0]} to {anchors[-1]}"
            yield DraftPass(
                rows=chosen,
                depths=range(asked.num_draft_tokens),
                where=where,
                hidden=asked.checked(x, where).view(*ids.shape[:2], *x.shape[1:]),
            )


class BlockAttention:
    """`Attend` of blocks: fused features [B, C, W] before each anchor, and the block."""

    def __init__(self, forward: BlockForward, rows: Tensor) -> None:
        self._forward = forward
        self._rows = rows
        self._context: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchors = range(0)

    def begin(self, anchors: range) -> None:
        """Announce the positions of the next blocks' anchors, the same A in each sequence."""
        self._anchors = anchors

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the announced blocks, [B * A, ...], sequence by sequence."""
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
        """softmax([q K_context^T ; q K_block^T] * scale ; sink) [V_context ; V_block ; 0].

        In float32 or wider.

        For A anchors: q [B, A, H, S, D], k [B, A, KV, S, D], v [B, A, KV, S, D'] give
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
        if (sinks := self._forward.sinks(layer)) is not None:
            column = sinks.to(wide).view(1, k.shape[1], 1, -1, 1, 1).expand(*shape, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., : visible.shape[-1]]
        of_context = (weights[..., :seen].flatten(2, 4) @ context_values).reshape(*shape, -1)
        of_block = (weights[..., seen:].flatten(3, 4) @ v).reshape(*shape, -1)
        return (of_context + of_block).transpose(1, 2).flatten(2, 3).to(dtype)

    def _visible(self, layer: int, anchors: Tensor, num_slots: int, seen: int) -> Tensor:
        """[A, 1, S, C + S] bool: context before the anchor, then the block, by the draft's mask."""
        context = positions(range(seen), anchors.device).expand(len(anchors), -1)
        slots = anchors[:, None] + positions(range(num_slots), anchors.device)
        keys = torch.cat((context, slots), dim=1)[:, None]
        known = torch.cat((context < anchors[:, None], slots >= anchors[:, None]), dim=1)[:, None]
        return (known & self._forward.visible(layer, slots[..., None], keys))[:, None]
