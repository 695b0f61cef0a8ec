"""Whether tensors hold finite numbers alone.

NaN and infinity have an exponent of all ones, above that of every number. So the maxima of the
bits, once as signed and once as unsigned integers, show those of both signs, at the speed of
memory.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError
from .checkpoint import Checkpoint, byte_blocks
from .safetensors_header import WORKERS, TensorInfo

MEND = "export the draft again, or download it again: nothing sound can be computed with it"
_MOST_NAMED = 10  # tensors of one message


_BITS: Mapping[str, tuple[str, int, int]] = {
    "BF16": ("<i2", 0x7F80, 0xFF80),
    "F16": ("<i2", 0x7C00, 0xFC00),
    "F32": ("<i4", 0x7F800000, 0xFF800000),
    "F64": ("<i8", 0x7FF << 52, 0xFFF << 52),
    "F8_E5M2": ("i1", 0x7C, 0xFC),
    "F8_E4M3": ("i1", 0x7F, 0xFF),  # has no infinity
    "F8_E8M0": ("i1", 0x80, 0xFF),  # nor a sign: no signed byte is 0x80
}
"""Signed integers of that size, and the first bits that are not numbers, for either sign."""
_SCALES = ("_scale", "_scales")
"""Ends of names of F8_E8M0 scales whose dtype MXFP4's exporters call U8, like their codes'."""


class Finiteness:
    """Finds NaN and infinity in one tensor of a safetensors dtype; all integers are finite."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self._bits, self._shape = _BITS.get(dtype), shape
        self._done = self._count = 0
        self._first: tuple[int, ...] = ()

    def look(self, block: memoryview | npt.NDArray[Any]) -> None:
        """Check the next elements of the tensor, as stored."""
        if self._bits is None:
            return
        kind, plain, minus = self._bits
        signed = np.frombuffer(block, kind)
        bits = signed.view(f"u{signed.itemsize}")
        if signed.max(initial=0) >= plain or bits.max(initial=0) >= minus:
            bad = np.flatnonzero((signed >= plain) | (bits >= minus))
            if not self._count:
                place = np.unravel_index(self._done + bad[0], self._shape)
                self._first = tuple(map(int, place))
            self._count += len(bad)
        self._done += len(bits)

    @property
    def problem(self) -> str | None:
        """How many are not finite, and where the first one is; None = all are."""
        if not self._count:
            return None
        count, total = f"{self._count:,}", f"{math.prod(self._shape):,}"
        return f"NaN or infinity in {count} of {total} values, first at {list(self._first)}"


def not_finite(checkpoint: Checkpoint) -> dict[str, str]:
    """Read every floating-point tensor: name -> its NaN or infinity, if any."""
    with ThreadPoolExecutor(WORKERS) as pool:
        problems = pool.map(partial(problem_of, checkpoint), checkpoint.tensors.values())
        return {name: p for name, p in zip(checkpoint.tensors, problems, strict=True) if p}


def problem_of(checkpoint: Checkpoint, tensor: TensorInfo) -> str | None:
    """The same for one tensor."""
    is_scale = tensor.dtype == "U8" and tensor.name.endswith(_SCALES)
    dtype = "F8_E8M0" if is_scale else tensor.dtype
    finiteness = Finiteness(dtype, tensor.shape)
    if dtype in _BITS:
        for block in byte_blocks(checkpoint, tensor):
            finiteness.look(block)
    return finiteness.problem


def lines_of(problems: Mapping[str, str]) -> list[str]:
    """What `not_finite` found: a line for each of the first ten tensors, and one for the rest."""
    lines = [f"{name}: {problem}" for name, problem in sorted(problems.items())]
    if len(lines) > _MOST_NAMED:
        lines[_MOST_NAMED:] = [f"and {len(lines) - _MOST_NAMED} more tensors"]
    return lines


def check_finite(where: object, problems: Mapping[str, str]) -> None:
    """Refuse a draft that nothing can be computed with."""
    if problems:
        first, *others = lines_of(problems)
        raise CheckpointError(where, first, details=[f"  {line}" for line in others], fix=MEND)
