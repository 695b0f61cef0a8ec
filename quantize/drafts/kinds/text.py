"""Drafts that read tokens alone: a chain that began one row earlier.

A chain's row t reads token t + 1, so that no row of it reads token 0. A language model reads every
token at its own position: with one row put before the others, row t + 1 of the longer chain is the
row t that everyone else speaks of.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from ..forward import BLOCK_ROWS, Alive, DraftPass
from .chain import ChainForward


class TextForward(ChainForward):
    """A chain that reads the text alone: `step` reads a token at the token's own position.

    Hidden states are what `logits` reads; those given to `step` and `passes` are not looked at.
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
        before = torch.cat((token_ids[:, :1], token_ids), dim=1)  # the first of them is never read
        nothing = token_ids.new_empty((*token_ids.shape, 0))
        longer = super().passes(
            nothing,
            before,
            rows=_moved(rows, 1),
            num_draft_tokens=num_draft_tokens,
            block_rows=block_rows,
            alive=alive,
        )
        for one in longer:
            yield replace(one, rows=_moved(one.rows, -1))


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)
