"""Tensors that are no codes: the source's bytes, or norms that balancing and learning change."""

import numpy as np

from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.digests import NEWEST, Algorithm, Digest
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats, read_whole
from .learned_norms import factor_fault
from .verify_report import Compared, Fault, OnBytes


def compare_kept(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    on_bytes: OnBytes,
    algorithm: Algorithm = NEWEST,
) -> Compared:
    """Byte equality of a tensor of `source` and the one of the same name and shape in `output`."""
    digest = Digest(algorithm)
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
        if changed:
            other.update(b)
        done += len(a)
        on_bytes(2 * len(a))
    found = Compared(
        source_digests={tensor.name: str(digest)}, output_digests={tensor.name: str(other)}
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        found.faults.append(Fault(where=tensor.name, expected="the source's bytes", got=what))
    return found


def compare_changed(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    exponent: int,
    factor: float | None,
    on_bytes: OnBytes,
    algorithm: Algorithm = NEWEST,
) -> Compared:
    """A norm's weight that was divided by 2^exponent: every element exactly, its sign too.

    Float64 holds every quotient exactly, also of what is subnormal in float32.

    Args:
        source, output: the two sides.
        tensor: of the source.
        exponent: 0 where nothing was balanced.
        factor: by which elements may have changed besides, where the norm learned.
        on_bytes: called with bytes that were read.
        algorithm: of the digests.
    """
    a, b = read_whole(source, tensor), read_whole(output, output.tensors[tensor.name])
    on_bytes(a.size + b.size)
    before, after = (floats(block, tensor.dtype).astype(np.float64) for block in (a, b))
    wanted = before * 2.0**-exponent
    digests = Digest(algorithm), Digest(algorithm)
    for digest, block in zip(digests, (a, b), strict=True):
        digest.update(block.data)
    found = Compared(
        source_digests={tensor.name: str(digests[0])}, output_digests={tensor.name: str(digests[1])}
    )
    if factor is not None:
        fault = factor_fault(tensor.name, wanted, after, factor)
        found.faults += [fault] if fault else []
        return found
    wrong = np.flatnonzero(wanted.view(np.uint64) != after.view(np.uint64))
    if len(wrong):
        first = int(wrong[0])
        expected = f"the source's values / 2^{exponent}"
        got = f"{len(wrong)} other(s), first {after[first]:g} for {before[first]:g} at {first}"
        found.faults.append(Fault(where=tensor.name, expected=expected, got=got))
    return found


def _equal(a: memoryview, b: memoryview) -> bool:
    """Compared eight bytes at a time, as far as that goes."""
    whole = len(a) // 8 * 8
    x, y = (np.frombuffer(side[:whole], np.uint64) for side in (a, b))
    return np.array_equal(x, y) and a[whole:] == b[whole:]
