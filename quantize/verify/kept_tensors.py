"""Tensors that are no codes and do not change: the source's bytes, which are finite numbers."""

import numpy as np

from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.digests import NEWEST, Algorithm, Digest
from ..files.finiteness import Finiteness
from ..files.safetensors_header import TensorInfo
from .verify_report import Compared, Fault, NotFinite, OnBytes


def compare_kept(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    on_bytes: OnBytes,
    algorithm: Algorithm = NEWEST,
) -> Compared:
    """Byte equality of a tensor of `source` and the one of the same name and shape in `output`."""
    digest, finiteness = Digest(algorithm), Finiteness(tensor.dtype, tensor.shape)
    other = digest  # one hash serves both tensors up to the first difference
    changed, first_change, done = 0, -1, 0
    sides = byte_blocks(source, tensor), byte_blocks(output, output.tensors[tensor.name])
    for a, b in zip(*sides, strict=True):
        if not _equal(a, b):
            different = np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))
            if not changed:
                other = digest.copy()
                first_change = done + int(different[0])
            changed += len(different)
        digest.update(a)
        finiteness.look(a)
        if changed:
            other.update(b)
        done += len(a)
        on_bytes(2 * len(a))
    found = Compared(
        source_digests={tensor.name: str(digest)},
        output_digests={tensor.name: str(other)},
        faults=NotFinite.of(tensor.name, finiteness.problem),
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        found.faults.append(Fault(where=tensor.name, expected="the source's bytes", got=what))
    return found


def _equal(a: memoryview, b: memoryview) -> bool:
    """Compared eight bytes at a time, as far as that goes."""
    whole = len(a) // 8 * 8
    x, y = (np.frombuffer(side[:whole], np.uint64) for side in (a, b))
    return np.array_equal(x, y) and a[whole:] == b[whole:]
