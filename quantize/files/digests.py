"""Digests, which identify the bytes of tensors; and whether these are finite numbers.

They use BLAKE3, which takes a fifth of the time of SHA-256, and begin with its name.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ...recipes.errors import CheckpointError
from .checkpoint import Checkpoint, byte_blocks
from .safetensors_header import WORKERS, TensorInfo


class Digest:
    """A digest in the making; records hold its `str`."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        self._hash.update(data)

    def copy(self) -> "Digest":
        """A digest that starts with the same bytes."""
        other = Digest()
        other._hash = self._hash.copy()
        return other

    def __str__(self) -> str:
        return f"blake3:{self._hash.hexdigest()}"


def tensor_digest(
    checkpoint: Checkpoint,
    tensor: TensorInfo,
    on_block: Callable[[memoryview], None] = lambda _block: None,
) -> str:
    """Digest of a tensor's bytes, which are read block by block; `on_block` sees each."""
    digest = Digest()
    for block in byte_blocks(checkpoint, tensor):
        digest.update(block)
        on_block(block)
    return str(digest)


def tensor_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digest of every tensor, by name."""
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = pool.map(partial(tensor_digest, checkpoint), checkpoint.tensors.values())
        return dict(zip(checkpoint.tensors, digests, strict=True))


def tensors_sha256(digests: Mapping[str, str]) -> str:
    """Identity of the weights of a folder: a hash over names and digests of all its tensors."""
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# NaN and infinity have an exponent of all ones, above that of every number. So the maxima of the
# bits, once as signed and once as unsigned integers, show those of both signs, at the speed of
# memory.

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
        unsigned = signed.view(f"u{signed.itemsize}")
        if signed.max(initial=0) >= plain or unsigned.max(initial=0) >= minus:
            bad = np.flatnonzero((signed >= plain) | (unsigned >= minus))
            if not self._count:
                place = np.unravel_index(self._done + bad[0], self._shape)
                self._first = tuple(map(int, place))
            self._count += len(bad)
        self._done += len(unsigned)

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
