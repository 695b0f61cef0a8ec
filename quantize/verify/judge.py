"""What judges the codes of one linear, block by block; and the judge that asks the least."""

from typing import Protocol

import numpy as np

from ..stored.decode import Bytes, Floats
from .report import Fault


class Judge(Protocol):
    """Collects the codes that a rule does not give.

    Attributes:
        wrong: how many. max_error: see `LinearFinding`.
    """

    wrong: int
    max_error: float | None

    def add(self, first_row: int, w: Floats, codes: Floats, stored: Bytes) -> None:
        """Judge a block of rows; its arrays are reused afterwards.

        Args:
            first_row: of the block.
            w: [rows, in_features], the source weight.
            codes: [rows, in_features], decoded.
            stored: the bytes that they were decoded from, all rows' where codes are transposed.
        """

    def faults(self, name: str) -> list[Fault]:
        """At most one fault, of the tensor `name`."""


class Buffers:
    """Arrays kept from block to block: fresh ones cost more in page faults than the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Floats:
        """A contiguous array of `shape`; one name always has the same width, and no more rows."""
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = np.empty(shape, np.float32)
        return array[: shape[0]]


class Numbers:
    """Every code is a number: only F8_E4M3 has codes that are none."""

    def __init__(self) -> None:
        self.wrong = 0
        self.max_error: float | None = None
        self._first = (0, 0)

    def add(self, first_row: int, w: Floats, codes: Floats, stored: Bytes) -> None:
        """See `Judge.add`."""
        del w, stored
        bad = np.argwhere(np.isnan(codes))
        if len(bad) and not self.wrong:
            self._first = first_row + int(bad[0, 0]), int(bad[0, 1])
        self.wrong += len(bad)

    def faults(self, name: str) -> list[Fault]:
        """See `Judge.faults`."""
        if not self.wrong:
            return []
        got = f"{self.wrong} NaN(s), first at row {self._first[0]}, column {self._first[1]}"
        return [Fault(where=name, expected="codes that are numbers", got=got)]
