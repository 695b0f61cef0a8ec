"""The weights of a stored draft as tensors of torch, read and decoded a block of rows at a time.

Held on the device and in the dtype that is asked for, or as narrow as they are stored; what equals
a tensor that is held already is held once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...recipes.roles import QUANTIZABLE
from ..drafts import Row
from ..errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.finiteness import Finiteness, check_finite
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import Bytes, read_rows
from .stored_draft import StoredDraft

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
                 "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}  # fmt: skip
BLOCK_BYTES = 32 << 20  # as stored; decoding takes some eight times as much


def held_dtype(stored: StoredDraft, row: Row, dtype: torch.dtype, *, compact: bool) -> torch.dtype:
    """What a row of `stored.draft` is held in.

    Args:
        compact: matrices of a narrower dtype stay as they are stored, to be widened at each use.

    Returns:
        Integers as stored. For codes whose inputs are rounded too, float32 at least: kernels
        multiply codes with codes and scale the sums, so that nothing is rounded but these.
    """
    if stored.is_quantized(row):
        scheme = stored.scheme_of(row)
        rounded = scheme is not None and scheme.activations != "none"
        return torch.promote_types(dtype, torch.float32) if rounded else dtype
    own = _TORCH_DTYPES[row.tensor.dtype]
    if not own.is_floating_point:
        return own
    fits = len(row.tensor.shape) == 2 and torch.promote_types(own, dtype) == dtype
    return own if compact and fits else dtype


def read_weight(
    stored: StoredDraft,
    row: Row,
    dtype: torch.dtype,
    *,
    device: torch.device,
    twin: Tensor | None = None,
) -> Tensor:
    """A row of `stored.draft` as plain weights.

    Args:
        dtype: see `held_dtype`.
        device: where to hold it.
        twin: what another draft holds under this name, returned instead of a copy where every bit
            of it is the same.

    Raises:
        CheckpointError: something is quantized that no engine multiplies by codes, or is NaN or
            infinite, or the folder changed.
    """
    if stored.is_quantized(row) and row.role not in QUANTIZABLE:
        raise CheckpointError(
            stored.checkpoint.folder,
            f"{row.module} is quantized; engines take the {row.role} as floats only",
            fix=f"quantize {', '.join(QUANTIZABLE)} only",
        )
    shape = row.tensor.shape
    if twin is not None and (twin.dtype, twin.shape, twin.device.type) == (
        dtype, torch.Size(shape), device.type
    ):  # fmt: skip
        blocks = _blocks(stored, row)
        if all(_same_bits(block.to(twin.device, dtype), twin[at]) for at, block in blocks):
            return twin
    weight = torch.empty(shape, dtype=dtype, device=device)
    for at, block in _blocks(stored, row):
        weight[at] = block
    return weight


def blocks_of_bytes(checkpoint: Checkpoint, tensor: TensorInfo) -> Iterator[tuple[slice, Bytes]]:
    """The rows of a tensor and their bytes, some at a time; a tensor without axes is one row.

    Raises:
        CheckpointError: the file shrank or vanished while being read.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    for at in _slices(rows, tensor.nbytes):
        yield at, read_rows(checkpoint, tensor, at.start, at.stop)


def _blocks(stored: StoredDraft, row: Row) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight and their values, in the dtype of the file or as decoded, float32.

    Raises:
        CheckpointError: behind the last, if any was NaN or infinite.
    """
    tensor = row.tensor
    if stored.is_quantized(row):
        linear, finiteness = stored.linear(row), Finiteness("F32", tensor.shape)
        for at in _slices(linear.out_features, tensor.numel * 2):
            decoded = linear.decoded(range(at.start, at.stop)).dequantized()
            finiteness.look(decoded)
            yield at, torch.from_numpy(decoded)
    else:
        finiteness = Finiteness(tensor.dtype, tensor.shape)
        for at, block in blocks_of_bytes(stored.checkpoint, tensor):
            finiteness.look(block)
            found = torch.from_numpy(block)
            is_mask = tensor.dtype == "BOOL"
            found = found != 0 if is_mask else found.view(_TORCH_DTYPES[tensor.dtype])
            yield at, found.reshape(-1, *tensor.shape[1:]) if tensor.shape else found
    if finiteness.problem:
        check_finite(stored.checkpoint.folder, {tensor.name: finiteness.problem})


def _slices(rows: int, nbytes: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES * rows // max(nbytes, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of the sign of zero."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
