"""Tensors that are no codes: the source's bytes, or, of a balanced norm, those of source / 2^k."""

import hashlib

import numpy as np

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import floats, read_rows, read_whole
from .verify_report import Compared, Fault, OnBytes, blocks_of

_BLOCK = 2**21  # bytes


def compare_kept(
    source: Checkpoint, output: Checkpoint, tensor: TensorInfo, on_bytes: OnBytes
) -> Compared:
    """Byte equality of a tensor of `source` and the one of the same name and shape in `output`."""
    stored = output.tensors[tensor.name]
    rows = tensor.shape[0] if tensor.shape else 1
    digest = hashlib.sha256()
    other = digest  # one hash serves both tensors up to the first difference
    changed, first_change = 0, -1
    for block in blocks_of(rows, _rows_per_block(tensor)):
        a = read_rows(source, tensor, block.start, block.stop)
        b = read_rows(output, stored, block.start, block.stop)
        if not np.array_equal(a, b):
            different = np.flatnonzero(a != b)
            if not changed:
                other = digest.copy()
                first_change = block.start * (tensor.nbytes // rows) + int(different[0])
            changed += len(different)
        digest.update(a.data)
        if changed:
            other.update(b.data)
        on_bytes(2 * a.size)
    found = Compared(
        source_sha256={tensor.name: digest.hexdigest()},
        output_sha256={tensor.name: other.hexdigest()},
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        found.faults.append(Fault(where=tensor.name, expected="the source's bytes", got=what))
    return found


def compare_balanced(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    exponent: int,
    on_bytes: OnBytes,
) -> Compared:
    """A norm's weight that was divided by 2^exponent: every element exactly, its sign too.

    Float64 holds every quotient exactly, also of what is subnormal in float32.
    """
    a, b = read_whole(source, tensor), read_whole(output, output.tensors[tensor.name])
    on_bytes(a.size + b.size)
    before, after = (floats(block, tensor.dtype).astype(np.float64) for block in (a, b))
    wanted = before * 2.0**-exponent
    wrong = np.flatnonzero(wanted.view(np.uint64) != after.view(np.uint64))
    found = Compared(
        source_sha256={tensor.name: hashlib.sha256(a.data).hexdigest()},
        output_sha256={tensor.name: hashlib.sha256(b.data).hexdigest()},
    )
    if len(wrong):
        first = int(wrong[0])
        expected = f"the source's values / 2^{exponent}"
        got = f"{len(wrong)} other(s), first {after[first]:g} for {before[first]:g} at {first}"
        found.faults.append(Fault(where=tensor.name, expected=expected, got=got))
    return found


def _rows_per_block(tensor: TensorInfo) -> int:
    rows = tensor.shape[0] if tensor.shape else 1
    return max(1, _BLOCK // max(1, tensor.nbytes // max(1, rows)))
