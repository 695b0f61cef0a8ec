"""A stored weight as blocks of rows, read one by one into one buffer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .checkpoint import pread_exactly
from .safetensors_header import TensorInfo

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def row_blocks(
    descriptor: int, tensor: TensorInfo, *, block_bytes: int, multiple: int
) -> Iterator[Tensor]:
    """Consecutive blocks of rows; the buffer is reused, so use each before the next.

    Args:
        tensor: [rows, in_features], BF16, F16 or F32.
        block_bytes: size that a block should have at most.
        multiple: all blocks but the last have a multiple of so many rows, at least once.

    Raises:
        CheckpointError: the file shrank.
    """
    rows, columns = tensor.shape
    row_bytes = tensor.nbytes // max(rows, 1)
    fitting = block_bytes // max(row_bytes, 1)
    step = rows if fitting >= rows else min(rows, max(multiple, fitting // multiple * multiple))
    buffer = torch.empty(step * row_bytes, dtype=torch.uint8)
    view = buffer.numpy().data
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = view[: count * row_bytes]
        pread_exactly(descriptor, part, tensor.start + first * row_bytes, tensor.name)
        block = buffer[: count * row_bytes].view(DTYPES[tensor.dtype])
        yield block.view(count, columns)
