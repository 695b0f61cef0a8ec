"""Generated drafts: configs, names and shapes of drafts.json, filled with drawn numbers.

Nothing of the product and no float library is used: values come from integers, so that a folder has
the same bytes wherever it is made.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
Bits = npt.NDArray[np.uint16]
_BYTES = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}


class Stored(NamedTuple):
    """One tensor as drafts.json describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_generated_draft(name: str, folder: Path) -> None:
    """Write the draft of this name in drafts.json into `folder`, which must not exist."""
    made = json.loads((HERE / "drafts.json").read_text(encoding="utf-8"))[name]
    folder.mkdir(parents=True)
    for file, content in {"config.json": made["config"], "tokenizer_config.json": {}}.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / file).write_text(text, encoding="utf-8")
    tensors = [Stored(key, dtype, tuple(shape)) for key, (dtype, shape) in made["tensors"].items()]
    if made.get("pickled"):
        _write_pickle(folder / "pytorch_model.bin", tensors)
        return
    shards: int = made.get("shards", 1)
    files = {
        "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors": [
            tensor for number, tensor in enumerate(tensors) if number * shards // len(tensors) == i
        ]
        for i in range(shards)
    }
    for file, members in files.items():
        _write_safetensors(folder / file, members)
    if shards > 1:
        index = {
            "metadata": {"total_size": sum(_size(tensor) for tensor in tensors)},
            "weight_map": {tensor.name: file for file, part in files.items() for tensor in part},
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_safetensors(path: Path, tensors: list[Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + _size(tensor)
        kind = {"dtype": tensor.dtype, "shape": tensor.shape}
        header[tensor.name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(_data(tensor))


def _write_pickle(path: Path, tensors: list[Stored]) -> None:
    """BF16 tensors as older tools save them."""
    import torch

    values = {
        tensor.name: torch.frombuffer(bytearray(_data(tensor)), dtype=torch.bfloat16).reshape(
            tensor.shape
        )
        for tensor in tensors
    }
    torch.save(values, path)


def _size(tensor: Stored) -> int:
    return int(np.prod(tensor.shape)) * _BYTES[tensor.dtype]


def _data(tensor: Stored) -> bytes:
    """d2t and t2d keep every second token; norms lie near one, other values are bell-shaped."""
    if tensor.dtype == "I64":
        return np.arange(tensor.shape[0], dtype=np.int64).tobytes()
    if tensor.dtype == "BOOL":
        return (np.arange(tensor.shape[0]) % 2 == 0).tobytes()
    draw = np.random.Generator(np.random.PCG64(zlib.crc32(tensor.name.encode())))
    # The sum of four integers below 2^12, centred: exact in float32, deviation 2365.
    sums = draw.integers(0, 4096, (4, *tensor.shape), dtype=np.int32).sum(axis=0) - 8190
    bell = sums.astype(np.float32) / np.float32(2365)
    if len(tensor.shape) == 1:
        values = np.float32(1) + bell / np.float32(8)
    else:  # times a power of two near 1 / sqrt(columns)
        values = bell * np.float32(2.0 ** -(tensor.shape[-1].bit_length() // 2))
    return values.tobytes() if tensor.dtype == "F32" else _bf16(values).tobytes()


def _bf16(values: npt.NDArray[np.float32]) -> Bits:
    """The upper halves of the bits, rounded to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
