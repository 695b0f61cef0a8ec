"""Pages of hidden states in an engine's cache, on any device, and writing those of one request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...quantize.files.safetensors_file import SafetensorsFile
from ...quantize.files.safetensors_header import StoredTensor
from ..traces.prompt_trace import FEATURE_DTYPES
from .states_file import UNFINISHED, StatesHead

_PIECE_BYTES = 16 * 2**20  # copied at a time
_DTYPES = dict(FEATURE_DTYPES.values())


class Pages:
    """The cache of one layer, read by slot.

    Args:
        cache: [blocks, L, rows of a block, W]: blocks that hold L states of width W per token.
        block_size: tokens to a block as the scheduler counts them, a multiple of the rows: its
            blocks are so many of the cache's, one after another.
    """

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
        """When what has been queued on the device by now is done; None where nothing is queued."""
        return self._stream and torch.cuda.current_stream(self._cache.device).record_event()

    def slots(self, block_ids: Sequence[int], count: int) -> Tensor:
        """The places of the first `count` tokens of a request, [count] int64.

        Raises:
            ValueError: its blocks hold fewer.
        """
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        if len(slots) < count:
            raise ValueError(f"{count} tokens, but pages for {len(slots)}")
        return slots[:count]

    def read(self, slots: Tensor, ready: Any) -> Tensor:
        """The states at these places, [len(slots), L, W], in the memory of the host."""
        if self._stream is None:
            return self._gathered(slots)
        with torch.cuda.stream(self._stream):  # beside the engine's own, which goes on
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
    """Write the states of one request; `path` appears whole or not at all.

    Args:
        pages: where the states lie.
        block_ids: the request's, in order.
        ready: see `Pages.ready`.

    Raises:
        ValueError: the pages do not hold as many tokens.
        OSError: it cannot be written.
    """
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
