"""The concat input of EAGLE-3: how far the two halves of its first linears are apart.

With one scale per row, a half of [norm(embedding); norm(hidden)] whose weights are much smaller
than the other's is rounded to zero, and acceptance collapses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..drafts.family import Draft, Row
from ..stored.decoded_numbers import floats, read_rows

SAMPLED_ROWS = 256
HARMFUL_RATIO = 4.0
"""From here on INT4 per-channel visibly loses the smaller half (at 10, 99 % of it becomes zero)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRatio:
    """Mean row absmax of the hidden half over the embedding half's, in rows evenly spread."""

    name: str
    ratio: float
    num_rows: int

    @property
    def harmful(self) -> bool:
        """True if one scale per row costs the smaller half most of its INT4 codes."""
        return max(self.ratio, 1 / self.ratio) >= HARMFUL_RATIO if self.ratio > 0 else True


def half_ratios(draft: Draft) -> tuple[HalfRatio, ...]:
    """Measure every linear that reads the concat input."""
    return tuple(_ratio(draft, row) for row in draft.concat_linears())


def balance_exponent(ratios: Sequence[float]) -> int:
    """The k that brings the halves of linears before one norm closest together; 0 = leave them.

    Of ratios of magnitudes, hidden half over embedding half, 0 and infinity say nothing.
    """
    logs = [math.log2(ratio) for ratio in ratios if 0 < ratio < math.inf]
    if not logs or max(map(abs, logs)) < math.log2(HARMFUL_RATIO):
        return 0
    return round((min(logs) + max(logs)) / 2)


def _ratio(draft: Draft, row: Row) -> HalfRatio:
    rows, columns = row.tensor.shape
    sampled = np.unique(np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64))
    blocks = (read_rows(draft.checkpoint, row.tensor, i, i + 1) for i in sampled.tolist())
    sizes = np.abs(np.stack([floats(block, row.tensor.dtype) for block in blocks]))
    halves = sizes[:, : columns // 2].max(axis=1), sizes[:, columns // 2 :].max(axis=1)
    embedding, hidden = (float(half.mean()) for half in halves)
    ratio = hidden / embedding if embedding > 0 else float("inf")
    return HalfRatio(name=row.tensor.name, ratio=ratio, num_rows=len(sampled))
