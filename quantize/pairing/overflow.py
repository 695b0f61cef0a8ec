"""Weights and hidden states that float16 cannot hold, of a draft that is computed in it.

Source: IEEE 754: float16 ends at 65,504; what rounds beyond it becomes infinity.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..engines.contract import ENGINE_NAMES, TITLES, EngineName
from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats
from .dtypes import dtype_in, launch_dtype, stored_dtype
from .pair import Pair, PairFinding

_FIRST_OVERFLOW = 65520.0
"""The smallest value that rounds to infinity in float16."""
_NARROW = "float16"
_WIDE = ("BF16", "F32")


class Overflow(NamedTuple):
    """A tensor with values beyond float16: how many, and the largest magnitude."""

    tensor: str
    values: int
    largest: float


def overflows(checkpoint: Checkpoint) -> Iterator[Overflow]:
    """Each tensor of BF16 or float32 that float16 cannot hold.

    Raises:
        CheckpointError: a file shrank or vanished.
    """
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in _WIDE:
            values, largest = _beyond(checkpoint, tensor)
            if values:
                yield Overflow(tensor.name, values, largest)


def _beyond(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[int, float]:
    values, largest = 0, 0.0
    for block in byte_blocks(checkpoint, tensor):
        magnitudes = np.abs(floats(np.frombuffer(block, np.uint8), tensor.dtype))
        values += int(np.count_nonzero(magnitudes >= _FIRST_OVERFLOW))
        largest = max(largest, float(magnitudes.max(initial=0.0)))
    return values, largest


def float16(pair: Pair) -> Iterator[PairFinding]:
    """Weights beyond float16, scanned where an engine computes the draft in it.

    Raises:
        CheckpointError: a file shrank or vanished.
    """
    narrow = [engine for engine in ENGINE_NAMES if _is_narrow(pair, engine)]
    found = list(overflows(pair.draft)) if narrow and stored_dtype(pair) != _NARROW else []
    if not found:
        return
    worst = max(found, key=lambda each: each.largest)
    for engine in narrow:
        yield PairFinding(
            "wrong",
            "float16",
            f"{TITLES[engine]} computes the draft in float16, and {len(found)} of its tensors hold"
            f" values beyond it ({worst.tensor} up to {worst.largest:,.0f}): they become infinite,"
            " and no token is accepted",
            "serve target and draft with --dtype bfloat16",
            engine,
        )


def activations(pair: Pair) -> Iterator[PairFinding]:
    """Recorded hidden states of the target that float16 cannot hold."""
    largest = pair.largest_feature
    for engine in ENGINE_NAMES:
        if largest is None or largest < _FIRST_OVERFLOW or not _is_narrow(pair, engine):
            continue
        yield PairFinding(
            "wrong",
            "float16",
            f"{TITLES[engine]} computes the draft in float16, and the traces hold hidden states of"
            f" the target up to {largest:,.0f}, beyond float16: the draft reads infinities there,"
            " and no token is accepted",
            "serve target and draft with --dtype bfloat16",
            engine,
        )


def _is_narrow(pair: Pair, engine: EngineName) -> bool:
    return (launch_dtype(pair, engine) or dtype_in(pair, engine)) == _NARROW
