"""The passes of a draft that reads tokens alone, as those of a chain that began one row earlier.

A chain's row t reads token t + 1, so that no row of it reads token 0. A language model reads every
token at its own position: with one row put before the others, row t + 1 of the longer chain is the
row t that everyone else speaks of.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...quantize.drafts.forward import TextForward
from .chain import chain_passes
from .draft_pass import BLOCK_ROWS, DraftPass


def text_passes(
    forward: TextForward,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[DraftPass]:
    """`chain_passes` of a draft that reads no hidden state of the target.

    Args:
        forward: the draft.
        token_ids: [B, N] int64.
        rows: see `chain_passes`, as the other arguments.
        num_draft_tokens: likewise.
        block_rows: likewise.

    Raises:
        CalibrationError: a hidden state is NaN or infinite.
    """
    before = torch.cat((token_ids[:, :1], token_ids), dim=1)  # the first of them is never read
    nothing = token_ids.new_empty((*token_ids.shape, 0))
    for one in chain_passes(
        forward,
        nothing,
        before,
        rows=_moved(rows, 1),
        num_draft_tokens=num_draft_tokens,
        block_rows=block_rows,
    ):
        yield replace(one, rows=_moved(one.rows, -1))


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)
