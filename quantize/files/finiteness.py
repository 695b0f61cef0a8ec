"""NaN and infinity among stored numbers, seen in their bits while these are read anyway.

They have an exponent of all ones, above that of every number. So the largest of the bits, once as
signed and once as unsigned integers, shows those of both signs, as fast as memory gives the bytes.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .checkpoint import Checkpoint, byte_blocks
from .safetensors_header import TensorInfo
from .workers import WORKERS

MEND = "export the draft again, or download it again: nothing sound can be computed with it"
_MOST_NAMED = 10  # tensors of one message


class _Bits(NamedTuple):
    """The first bits that are no number, of the plain sign and of the other one."""

    signed: str
    plain: int
    minus: int


_BITS: Mapping[str, _Bits] = {
    "BF16": _Bits("<i2", 0x7F80, 0xFF80),
    "F16": _Bits("<i2", 0x7C00, 0xFC00),
    "F32": _Bits("<i4", 0x7F800000, 0xFF800000),
    "F64": _Bits("<i8", 0x7FF << 52, 0xFFF << 52),
    "F8_E5M2": _Bits("i1", 0x7C, 0xFC),
    "F8_E4M3": _Bits("i1", 0x7F, 0xFF),  # has no infinity
    "F8_E8M0": _Bits("i1", 0x80, 0xFF),  # nor a sign: no signed byte is 0x80
}
_SCALES = ("_scale", "_scales")
"""Ends of names of F8_E8M0 that MXFP4's exporters call U8, as they call its codes."""


class Finiteness:
    """What is NaN or infinite in one tensor.

    Args:
        dtype: of its elements, in the safetensors spelling; all integers are finite.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self._bits, self._shape = _BITS.get(dtype), shape
        self._done = self._count = 0
        self._first: tuple[int, ...] = ()

    def look(self, block: memoryview | npt.NDArray[Any]) -> None:
        """The next elements of the tensor, as stored."""
        if self._bits is None:
            return
        signed = np.frombuffer(block, self._bits.signed)
        found = signed.view(f"u{signed.itemsize}")
        if signed.max(initial=0) >= self._bits.plain or found.max(initial=0) >= self._bits.minus:
            bad = np.flatnonzero((signed >= self._bits.plain) | (found >= self._bits.minus))
            if not self._count:
                place = np.unravel_index(self._done + bad[0], self._shape)
                self._first = tuple(map(int, place))
            self._count += len(bad)
        self._done += len(found)

    @property
    def problem(self) -> str | None:
        """How many are not finite, and where the first one is; None = all are."""
        if not self._count:
            return None
        count, total = f"{self._count:,}", f"{math.prod(self._shape):,}"
        return f"NaN or infinity in {count} of {total} values, first at {list(self._first)}"


def not_finite(checkpoint: Checkpoint) -> dict[str, str]:
    """Read every tensor of numbers with an exponent: name -> what is NaN or infinite in it, if any.

    Raises:
        CheckpointError: a file shrank or vanished while being read.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        problems = pool.map(partial(problem_of, checkpoint), checkpoint.tensors.values())
        return {name: p for name, p in zip(checkpoint.tensors, problems, strict=True) if p}


def problem_of(checkpoint: Checkpoint, tensor: TensorInfo) -> str | None:
    """The same of one tensor.

    Raises:
        CheckpointError: as of `not_finite`.
    """
    is_scale = tensor.dtype == "U8" and tensor.name.endswith(_SCALES)
    dtype = "F8_E8M0" if is_scale else tensor.dtype
    found = Finiteness(dtype, tensor.shape)
    if dtype in _BITS:
        for block in byte_blocks(checkpoint, tensor):
            found.look(block)
    return found.problem


def lines_of(found: Mapping[str, str]) -> list[str]:
    """What `not_finite` found: a line for each of the first ten tensors, and one for the others."""
    lines = [f"{name}: {problem}" for name, problem in sorted(found.items())]
    if len(lines) > _MOST_NAMED:
        lines[_MOST_NAMED:] = [f"and {len(lines) - _MOST_NAMED} more tensors"]
    return lines


def check_finite(where: object, found: Mapping[str, str]) -> None:
    """Refuse a draft with which nothing can be computed.

    Args:
        found: of tensors with NaN or infinity, what `not_finite` says.

    Raises:
        CheckpointError: there are any.
    """
    if found:
        first, *others = lines_of(found)
        raise CheckpointError(where, first, details=[f"  {line}" for line in others], fix=MEND)
