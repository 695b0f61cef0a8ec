"""Which rows of the passes are looked at: those that may still be accepted.

What counts of a row are its proposals up to the first one that cannot be accepted. Behind
it a chain computes nothing deeper, and no kind of draft multiplies by its head, which is most of
the work.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...quantize.drafts.forward import Alive, DraftPass, not_finite

FEWEST_ROWS = 16
"""Rows that are multiplied together at least: libraries sum fewer of them in another order."""


class CountedRows:
    """The rows of the B sequences of a batch that are counted, while the passes go by.

    Args:
        counted: of each sequence; None = all, at every depth.
    """

    def __init__(self, counted: Sequence[range] | None) -> None:
        self._counted = counted
        self._rows: Tensor | None = None
        self._left: Tensor | None = None

    @property
    def alive(self) -> Alive | None:
        """For `DraftForward.passes`."""
        return None if self._counted is None else lambda: self._left

    def any_in(self, one: DraftPass, depth: int) -> bool:
        """Turn to a depth of a pass; whether any of its rows is looked at."""
        if depth == 0:
            self._rows = self._left = self._counted_in(one.rows, one.hidden.device)
        return self._rows is None or len(self._rows) > 0

    def states(self, one: DraftPass, depth: int) -> Tensor:
        """[n, W] of the rows that are looked at."""
        states = one.hidden[:, :, depth - one.depths.start]
        return states.flatten(0, 1) if one.kept is not None else self.of(states)

    def of(self, values: Tensor) -> Tensor:
        """[B, R, ...] of all rows of a pass -> [n, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._rows is None else flat[self._rows]

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write values [n] to their places in [B, R]."""
        if self._rows is None:
            into.copy_(values.view(into.shape))
        else:
            into[self._rows // into.shape[1], self._rows % into.shape[1]] = values

    def go_on(self, one: DraftPass, *, states: Tensor, top: Tensor, possible: Tensor) -> None:
        """Leave out what cannot be accepted; all that is asked of the device comes in one copy.

        Args:
            states: [n, W], that proposals were made from.
            top: [n], their largest logits; NaN and infinity are maximal.
            possible: [n] bool, where the proposal may be accepted.

        Raises:
            ForwardError: hidden states or logits are NaN or infinite.
        """
        sound = torch.stack((torch.isfinite(states).all(), torch.isfinite(top).all()))
        seen = _read(torch.cat((sound, possible)))
        if not seen[0]:
            raise not_finite(one.where, "hidden states")
        if not seen[1]:
            raise not_finite(f"draft rows {one.rows[0]} to {one.rows[-1]}", "logits")
        still = torch.from_numpy(seen[2:].nonzero()[0])
        if self._counted is None or len(still) == len(possible):
            self._left = None if one.kept is not None else self._rows
            return
        still = _enough(still).to(possible.device)
        self._rows = still if self._rows is None else self._rows[still]
        self._left = still if one.kept is not None else self._rows

    def _counted_in(self, rows: range, device: torch.device) -> Tensor | None:
        """[n] int64 of the B * R rows of a block, sequence after sequence; None = all of them."""
        if self._counted is None:
            return None
        own = [range(max(c.start, rows.start), min(c.stop, rows.stop)) for c in self._counted]
        if all(len(one) == len(rows) for one in own):
            return None
        found = [
            torch.arange(one.start, max(one.start, one.stop)) + i * len(rows) - rows.start
            for i, one in enumerate(own)
        ]
        return _enough(torch.cat(found)).to(device)


def _read(flags: Tensor) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = flags.cpu().numpy()
    return found


def _enough(rows: Tensor) -> Tensor:
    """The rows, where they are too few with the last one again and again; none stay none."""
    missing = FEWEST_ROWS - len(rows)
    return torch.cat((rows, rows[-1:].expand(missing))) if len(rows) and missing > 0 else rows
