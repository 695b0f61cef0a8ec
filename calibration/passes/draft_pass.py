"""What the passes of a draft along a trace have in common, whether it proposes chains or blocks.

Row t knows the tokens up to t + 1 and the target's features up to t; at depth j (0-based) it
predicts token t + 2 + j.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CalibrationError

BLOCK_ROWS = 256
MAX_SCORES = 2**24
"""Elements of one attention score matrix, all heads together: 64 MB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftPass:
    """What a draft computed at some rows and depths.

    Attributes:
        rows: R rows of the trace, evenly spaced.
        depths: D successive draft steps.
        hidden: [B, R, D, W], from which `DraftForward.logits` predicts the tokens of the target's
            positions row + 2 + depth.
    """

    rows: range
    depths: range
    hidden: Tensor


def whole_rows(num_tokens: int, num_draft_tokens: int, *, first_row: int) -> range:
    """The rows from `first_row` on whose predictions all lie inside a trace of `num_tokens`."""
    return range(first_row, max(first_row, num_tokens - 1 - num_draft_tokens))


def positions(steps: range, device: torch.device) -> Tensor:
    """[len(steps)] int64."""
    return torch.arange(steps.start, steps.stop, steps.step, device=device)


def finite(values: Tensor, where: str, what: str) -> Tensor:
    """The values, unchanged.

    Raises:
        CalibrationError: one of them is NaN or infinite.
    """
    if not bool(torch.isfinite(values).all()):
        raise CalibrationError(
            where, f"{what} are NaN or infinite", fix="inspect the draft's weights and scales"
        )
    return values
