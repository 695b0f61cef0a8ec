"""Drafts of several modules, each of them a chain's step: module i drafts token i + 1.

Every module goes over all rows in turn and keeps keys of its own. What rows before a round's last
one read at depth i are, as vLLM 0.33 serves it, the tokens that were accepted: it fills in again
what a rejected token had touched (`v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py:596`).
So the recorded tokens give the same keys, and drafting is teacher-forced without a difference.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from ..forward import BLOCK_ROWS, Alive, DraftForward, DraftPass, OnCache, finite, positions
from .chain import ChainAttention, ChainForward


class StagedForward(DraftForward):
    """A draft of several modules.

    A module goes over all rows, not over the chain's own alone: at depth i row t reads token
    t + 1 + i and what module i - 1 gave at row t, at position t, and looks at the rows before it as
    module i itself saw them. Hidden states for `logits` have the module's number behind them.
    """

    modules: Sequence[ChainForward]
    window: int | None = None
    """Rows that a query looks at, its own among them; None = all before it."""

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        # [..., W + 1], all of one module.
        return self._of(hidden).logits(hidden[..., :-1])

    @override
    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        return self._of(hidden).largest_logits(hidden[..., :-1], most)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        # [..., W + 1], all of one module.
        return self._of(hidden).head_input(hidden[..., :-1])

    @override
    def caching(self, on_cache: OnCache) -> Self:
        # Of every module, each of which is a layer of its own number.
        found = super().caching(on_cache)
        found.modules = [module.caching(on_cache) for module in self.modules]
        return found

    def _of(self, hidden: Tensor) -> ChainForward:
        return self.modules[int(hidden[..., -1].flatten()[0])]

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
        attentions = [ChainAttention(num_rows, self.window) for _ in range(num_draft_tokens)]
        for start in range(0, num_rows, block_rows):
            block = range(start, min(start + block_rows, num_rows))
            drafting = rows[bisect_left(rows, block.start) : bisect_left(rows, block.stop)]
            own = slice(drafting.start - start, drafting.stop - start, drafting.step)
            x = hidden[:, block.start : block.stop]
            for depth in range(num_draft_tokens):
                tokens = token_ids[:, block.start + 1 + depth : block.stop + 1 + depth]
                attentions[depth].begin(block, 0)
                x = self.modules[depth].step(
                    tokens, x, positions(block, x.device), attentions[depth]
                )
                where = f"draft step {depth + 1}"
                x = x if alive else finite(x, where)
                if drafting:
                    given = x[:, own]
                    number = torch.full_like(given[..., :1], depth)
                    out = torch.cat((given, number), dim=-1)[:, :, None]
                    at = range(depth, depth + 1)
                    yield DraftPass(rows=drafting, depths=at, where=where, hidden=out)
