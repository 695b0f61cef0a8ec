"""The passes of a draft of several heads, each of which proposes from the state of the row itself.

Head j reads the target's state of position t and predicts token t + 2 + j: no head reads a token,
or what another one proposed, so that rows and depths may be evaluated in any order.
"""

from collections.abc import Iterator

from torch import Tensor

from ...quantize.drafts.forward import HeadsForward
from .draft_pass import BLOCK_ROWS, DraftPass, finite


def head_passes(
    forward: HeadsForward,
    hidden: Tensor,
    *,
    rows: range,
    num_draft_tokens: int,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[DraftPass]:
    """Run the first K heads over some rows, a few rows at a time.

    Args:
        forward: the draft.
        hidden: [B, N - 1, W], the target's states, from position 0 on.
        rows: which of them propose.
        num_draft_tokens: K, as many heads as are asked.
        block_rows: rows evaluated together; changes the result by rounding only.

    Yields:
        One depth of some rows.

    Raises:
        CalibrationError: a hidden state is NaN or infinite.
    """
    for start in range(0, len(rows), block_rows):
        chosen = rows[start : start + block_rows]
        states = hidden[:, chosen.start : chosen.stop : chosen.step]
        for depth in range(num_draft_tokens):
            x = finite(forward.propose(states, depth), f"draft head {depth + 1}", "hidden states")
            yield DraftPass(rows=chosen, depths=range(depth, depth + 1), hidden=x[:, :, None])
