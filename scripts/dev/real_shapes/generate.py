"""A draft of real size with random weights, in the shape of a published one.

For measuring speed and memory, and for byte budgets. Its weights mean nothing: it predicts nothing.
"""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from ....quantize.files.checkpoint import CONFIG_FILE, UNVERIFIED_CONFIG_FILE, Checkpoint
from ....quantize.files.safetensors_file import SafetensorsFile
from ....quantize.files.safetensors_header import StoredTensor
from ....quantize.files.staging import check_output, staged_output, write_text
from .configs import INITIALIZER_RANGE, Config
from .drafts import DEFAULT_DRAFT, REAL_DRAFTS, Shapes

NORM_SPREAD = 0.05
PERIOD = 8_388_593  # prime: rows of any width start at different places of the tile


def stored_tensors(shapes: Shapes) -> tuple[StoredTensor, ...]:
    """The tensors of a draft as they are on disk."""
    return tuple(
        StoredTensor(name=f"{name}.weight", dtype="BF16", shape=shape)
        for name, shape in shapes.items()
    )


def write_real_shape_draft(
    folder: Path, *, draft: str = DEFAULT_DRAFT, seed: int = 0, scale: float = 1.0, divide: int = 1
) -> None:
    """Write the draft into a new folder: one tile of normals, read from another place per tensor.

    Drawing three billion normals takes minutes; repeating one tile is as fast as the disk and takes
    no memory beyond the tile. Equal arguments give equal bytes.
    """
    config = REAL_DRAFTS[draft].config(divide)
    tensors = stored_tensors(REAL_DRAFTS[draft].shapes(config))
    check_output(folder, needed_bytes=sum(tensor.nbytes for tensor in tensors))
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(PERIOD, generator=generator).mul_(INITIALIZER_RANGE * scale).bfloat16()
    tile = torch.cat((tile, tile))  # so that one period is contiguous from every start
    with staged_output(folder, last=CONFIG_FILE) as staging:
        path = staging / "model.safetensors"
        with SafetensorsFile(path, tensors, {"format": "pt"}) as output:
            for tensor in tensors:
                if len(tensor.shape) == 1:
                    noise = torch.randn(tensor.shape, generator=generator)
                    output.write(tensor.name, noise.mul_(NORM_SPREAD).add_(1).bfloat16())
                else:
                    start = int(torch.randint(PERIOD, (), generator=generator))
                    _repeat(output, tensor, tile[start : start + PERIOD])
        write_text(staging / UNVERIFIED_CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def write_sparse_model(folder: Path, config: Config, shapes: Shapes) -> Checkpoint:
    """Write headers and config.json into a new folder, and no weights: holes that read as zeros."""
    folder.mkdir()
    header: dict[str, object] = {}
    end = 0
    for tensor in stored_tensors(shapes):
        entry = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        header[tensor.name] = {**entry, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    write_text(folder / CONFIG_FILE, json.dumps(config))
    return Checkpoint.open(folder)


def _repeat(output: SafetensorsFile, tensor: StoredTensor, period: Tensor) -> None:
    """Fill a tensor by repeating the same elements."""
    written = 0
    while written < tensor.nbytes:
        rest = (tensor.nbytes - written) // period.element_size()
        written += output.write(tensor.name, period[:rest], offset=written)
