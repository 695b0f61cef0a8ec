"""The rows of a pass over several sequences that lie inside each of them, without what fills up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftPass, positions
from .sequences import LearningSequences


class OwnRows:
    """Of the R rows of a pass over B sequences those that lie inside each: n, one after the other.

    Which these are the host knows: nothing waits for a GPU.
    """

    def __init__(self, one: DraftPass, sequences: LearningSequences) -> None:
        self._shape = len(sequences.own), len(one.rows)
        self._device = one.hidden.device
        step, total = sequences.rows.step, len(one.rows)
        spans = (
            ((own[0] - one.rows[0]) // step, (own[-1] - one.rows[0]) // step + 1)
            for own in sequences.own
        )
        self._spans = [(min(max(a, 0), total), min(max(b, 0), total)) for a, b in spans]
        whole = all(span == (0, total) for span in self._spans)
        self._at = None if whole else self._places()

    def of(self, values: Tensor) -> Tensor:
        """[B, R, ...] -> [n, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._at is None else flat[self._at]

    def filled(self, values: Tensor) -> Tensor:
        """[n, ...] -> [B, R, ...], zeros elsewhere."""
        if self._at is not None:
            among = values.new_zeros(self._shape[0] * self._shape[1], *values.shape[1:])
            values = among.index_copy_(0, self._at, values)
        return values.view(*self._shape, *values.shape[1:])

    def sums(self, values: Tensor) -> Tensor:
        """[n] -> [B] float64, added up for each sequence."""
        return self.filled(values.double()).sum(1)

    def spread(self, values: Sequence[float]) -> Tensor:
        """A number of each sequence -> [n] float32."""
        spans = zip(values, self._spans, strict=True)
        return torch.cat([torch.full((b - a,), x, device=self._device) for x, (a, b) in spans])

    def all_right(self) -> Tensor:
        """[n] bool: nothing is wrong yet."""
        return torch.ones(sum(b - a for a, b in self._spans), dtype=torch.bool, device=self._device)

    def _places(self) -> Tensor:
        """[n] in the rows of all sequences."""
        rows = self._shape[1]
        return torch.cat(
            [positions(range(i * rows + a, i * rows + b), self._device)
             for i, (a, b) in enumerate(self._spans)]
        )  # fmt: skip
