"""What judges the codes of one linear, block by block; and the judge that asks the least."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ..stored.decoded_numbers import Bytes, Floats
from .verify_report import Fault


class Block:
    """A block of rows of a linear; its arrays are reused for the next one.

    Attributes:
        first_row: of the block.
        w: [rows, in_features], the source weight.
        stored: the bytes of its codes, those of all rows where codes are transposed.
    """

    def __init__(
        self, first_row: int, w: Floats, stored: Bytes, decode: Callable[[], Floats]
    ) -> None:
        self.first_row, self.w, self.stored = first_row, w, stored
        self._decode = decode

    @cached_property
    def codes(self) -> Floats:
        """[rows, in_features], decoded; whoever knows them otherwise sets them before."""
        return self._decode()


class Judge(ABC):
    """Collects the codes that a rule does not give.

    Attributes:
        wrong: how many.
        max_error: largest |w/scale - code| in units of what is allowed; None where nothing is held
            against bounds.
    """

    wrong = 0
    max_error: float | None = None

    @abstractmethod
    def add(self, block: Block) -> None:
        """Judge a block of rows."""

    @abstractmethod
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


class Numbers(Judge):
    """Every code is a number: only F8_E4M3 has codes that are none."""

    def __init__(self) -> None:
        self.first = (0, 0)

    @override
    def add(self, block: Block) -> None:
        self._count(block.first_row, np.isnan(block.codes))

    def _count(self, first_row: int, wrong: npt.NDArray[np.bool_]) -> None:
        if not wrong.any():
            return
        bad = np.argwhere(wrong)
        if not self.wrong:
            self.first = first_row + int(bad[0, 0]), int(bad[0, 1])
        self.wrong += len(bad)

    @override
    def faults(self, name: str) -> list[Fault]:
        return _faults(name, "quantized values that are numbers", f"{self.wrong} NaN(s)", self)


class CarriedNumbers(Numbers):
    """Every F8_E4M3 code is one of INT4: a whole number from -8 to 7, and no -0."""

    @override
    def add(self, block: Block) -> None:
        codes = block.codes
        good = (codes >= -8) & (codes <= 7) & (codes == np.rint(codes))
        self._count(block.first_row, ~(good & ~((codes == 0) & np.signbit(codes))))

    @override
    def faults(self, name: str) -> list[Fault]:
        return _faults(name, "whole numbers from -8 to 7", f"{self.wrong} other(s)", self)


def _faults(name: str, expected: str, got: str, judge: Numbers) -> list[Fault]:
    if not judge.wrong:
        return []
    row, column = judge.first
    where = f"first at row {row}, column {column}"
    return [Fault(where=name, expected=expected, got=f"{got}, {where}")]
