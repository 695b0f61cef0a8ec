"""The passes of a draft of several modules along a trace: module i for draft token i + 1.

Every module goes over all rows in turn and keeps keys of its own. What rows before a round's last
one read at depth i are, as vLLM 0.33 serves it, the tokens that were accepted: it fills in again
what a rejected token had touched (`v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py:596`).
So the recorded tokens give the same keys, and drafting is teacher-forced without a difference.
"""

from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

from ...quantize.drafts.forward import StagedForward
from .chain import ChainAttention
from .draft_pass import BLOCK_ROWS, DraftPass, finite, positions


def staged_passes(
    forward: StagedForward,
    hidden: Tensor,
    token_ids: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[DraftPass]:
    """Run the first K modules over the rows up to the last of `rows`, in blocks of rows.

    Args:
        forward: the draft, of at least K modules.
        hidden: [B, N - 1, W], what module 0 reads, from position 0 on.
        token_ids: [B, N] int64. Nothing looks ahead, so shorter sequences may be padded behind.
        rows: that draft; the rows before and between are context only.
        num_draft_tokens: K.
        block_rows: rows evaluated together; changes the result by rounding only.

    Yields:
        One depth of one block's rows.

    Raises:
        CalibrationError: a hidden state is NaN or infinite.
    """
    num_rows = rows[-1] + 1 if rows else 0
    attentions = [ChainAttention(num_rows, forward.window) for _ in range(num_draft_tokens)]
    for start in range(0, num_rows, block_rows):
        block = range(start, min(start + block_rows, num_rows))
        drafting = rows[bisect_left(rows, block.start) : bisect_left(rows, block.stop)]
        own = slice(drafting.start - start, drafting.stop - start, drafting.step)
        x = hidden[:, block.start : block.stop]
        for depth in range(num_draft_tokens):
            tokens = token_ids[:, block.start + 1 + depth : block.stop + 1 + depth]
            attentions[depth].begin(block, 0)
            x = forward.modules[depth].step(
                tokens, x, positions(block, x.device), attentions[depth]
            )
            finite(x, f"draft step {depth + 1}", "hidden states")
            if drafting:
                given = x[:, own]
                number = torch.full_like(given[..., :1], depth)
                out = torch.cat((given, number), dim=-1)[:, :, None]
                yield DraftPass(rows=drafting, depths=range(depth, depth + 1), hidden=out)
