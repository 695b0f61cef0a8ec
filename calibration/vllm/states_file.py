"""The file of one request that an engine's connector writes and the recorder reads.

A safetensors file: "token_ids" I64 [n], "hidden_states" [n, L, W] in the engine's dtype, for the L
layers and the n tokens that were read: prompt and continuation without its last token. Its metadata
are a `StatesHead`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import StoredTensor, read_header
from ...recipes.errors import TraceError, short
from ..traces import files_raise
from ..traces.manifest import FeatureDtype, is_printable_name
from ..traces.prompt_trace import FEATURE_DTYPES

STATES_KEY = "draftquant_states"
"""In `kv_transfer_params`: for a request its session, for its answer the file's name."""
SESSION = re.compile(r"[0-9a-f]{16}")
"""File names begin with the session's hex digits: files that nobody fetched can be removed."""
FOLDER_KEY = "draftquant_folder"  # in the connector's extra configuration: where files are written
FAILED = ".failed"  # the suffix of the file that says why another is not coming
UNFINISHED = ".unfinished"  # the suffix of a file that is being written

_AGAIN = "start the engine with the arguments of 'draftquant record --print-server-args'"


def layer_inputs(aux_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids in vLLM of the outputs of these layers.

    Our ids count layers by their outputs, vLLM's by their inputs: the output of layer i is the
    input of layer i + 1; that of the last layer, before the final norm, is the input of none.
    """
    return tuple(i + 1 for i in aux_layer_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesHead:
    """What a file says about itself."""

    layer_inputs: tuple[int, ...]
    engine: str

    def metadata(self) -> dict[str, str]:
        """As safetensors' metadata."""
        return {"layer_inputs": " ".join(map(str, self.layer_inputs)), "engine": self.engine}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStates:
    """What the file of a request must hold."""

    aux_layer_ids: tuple[int, ...]
    width: int
    dtype: FeatureDtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of hidden states."""
        return len(self.aux_layer_ids) * self.width * FEATURE_DTYPES[self.dtype][0].itemsize


def check_states(path: Path, expected: ExpectedStates, token_ids: Sequence[int]) -> str:
    """Check the header of a file, and that its tokens are these; returns its engine."""
    with files_raise(TraceError, "record again: its prompt is repeated"):
        header = read_header(path.parent, path.name)
    shape = (len(token_ids), len(expected.aux_layer_ids), expected.width)
    floats = FEATURE_DTYPES[expected.dtype][1]
    wanted = {"token_ids": ("I64", shape[:1]), "hidden_states": (floats, shape)}
    table = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    for name, tensor in wanted.items():
        if table.get(name) != tensor:
            got = f"{table[name][0]} {list(table[name][1])}" if name in table else "no such tensor"
            what = f"{name}: expected {tensor[0]} {list(tensor[1])}, got {got}"
            raise TraceError(path, what, fix=_AGAIN)
    ids = " ".join(map(str, layer_inputs(expected.aux_layer_ids)))
    if header.metadata.get("layer_inputs") != ids:
        got = short(header.metadata.get("layer_inputs"))
        raise TraceError(path, f"expected the inputs of layers {ids}, got {got}", fix=_AGAIN)
    engine = header.metadata.get("engine")
    if not is_printable_name(engine):
        raise TraceError(path, f"expected the name of an engine, got {short(engine)}", fix=_AGAIN)
    with safe_open(path, "pt") as file:
        written = file.get_tensor("token_ids").tolist()
    if written != list(token_ids):
        raise TraceError(path, "its tokens are not those of the request's answer",
                         fix="give each recorder a shared folder of its own")  # fmt: skip
    return engine


def read_features(path: Path) -> Tensor:
    """The states of a checked file as features: [n, L * W], the layers side by side."""
    with safe_open(path, "pt") as file:
        states: Tensor = file.get_tensor("hidden_states")
    return states.flatten(1)


_PIECE_BYTES = 16 * 2**20  # copied at a time
_DTYPES = dict(FEATURE_DTYPES.values())


class Pages:
    """The cache of one layer, [blocks, L, rows of a block, W], read by slot."""

    def __init__(self, cache: Tensor, block_size: int) -> None:
        rows = cache.shape[2]
        if block_size % rows:
            raise ValueError(
                f"draftquant: blocks of {block_size} tokens are no multiple of the cache's {rows};"
                " fix: leave block_size to the engine"
            )
        self._cache = cache
        self._block_size = block_size
        self._stream: Any = None
        if cache.is_cuda:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self.num_layers, self.width = cache.shape[1], cache.shape[3]
        self.dtype = cache.dtype

    def ready(self) -> Any:
        """An event after all work queued on the device so far; None where nothing is queued."""
        return self._stream and torch.cuda.current_stream(self._cache.device).record_event()

    def slots(self, block_ids: Sequence[int], count: int) -> Tensor:
        """The places of the first `count` tokens of a request, [count] int64."""
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        if len(slots) < count:
            raise ValueError(f"{count} tokens, but pages for {len(slots)}")
        return slots[:count]

    def read(self, slots: Tensor, ready: Any) -> Tensor:
        """The states at these places, [len(slots), L, W], in the memory of the host."""
        if self._stream is None:
            return self._gathered(slots)
        with torch.cuda.stream(self._stream):  # beside the engine's own, which continues
            self._stream.wait_event(ready)
            return self._gathered(slots.to(self._cache.device)).cpu()

    def _gathered(self, slots: Tensor) -> Tensor:
        rows = self._cache.shape[2]
        return self._cache[slots // rows, :, slots % rows]


def write_states(
    path: Path,
    pages: Pages,
    block_ids: Sequence[int],
    token_ids: Sequence[int],
    head: StatesHead,
    ready: Any,
) -> None:
    """Write the states of one request; `path` appears whole or not at all."""
    count = len(token_ids)
    slots = pages.slots(block_ids, count)
    shape = (count, pages.num_layers, pages.width)
    row_bytes = pages.num_layers * pages.width * pages.dtype.itemsize
    stored = [
        StoredTensor(name="token_ids", dtype="I64", shape=(count,)),
        StoredTensor(name="hidden_states", dtype=_DTYPES[pages.dtype], shape=shape),
    ]
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with SafetensorsFile(unfinished, stored, head.metadata()) as file:
            file.write("token_ids", torch.tensor(token_ids, dtype=torch.int64))
            piece = max(1, _PIECE_BYTES // row_bytes)
            for start in range(0, count, piece):
                states = pages.read(slots[start : start + piece], ready)
                file.write("hidden_states", states, offset=start * row_bytes)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
