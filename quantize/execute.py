"""Executing a plan: kept tensors are copied; weights are read, quantized and stored in blocks.

Reading, arithmetic and writing overlap: two threads take tensors, the largest first, and every step
releases the interpreter. Memory is bounded by two blocks of rows, or by one linear where a vendor
toolkit needs the whole weight.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ..recipes.schema import Recipe
from .backends import Backend
from .errors import BackendError
from .files.checkpoint import pread_exactly
from .files.safetensors_file import SafetensorsFile
from .files.safetensors_header import TensorInfo
from .layouts import Columns, get_layout
from .numerics.absmax import row_absmax
from .numerics.quantized_weight import QuantizedWeight
from .plan import Plan, Step

BLOCK_BYTES = 8 << 20  # of the source weight: its float32 copies then fit the caches of two cores
ROWS = 128
"""Blocks have a multiple of this many rows: whole blocks of FP8 scales, whole transposed words."""
WORKERS = 2
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def execute(
    plan: Plan,
    folder: Path,
    backend: Backend,
    *,
    input_scales: Mapping[str, float],
    allow_zero_rows: bool,
    on_progress: Callable[[Step], None],
) -> None:
    """Write every safetensors file of the plan into `folder`.

    Args:
        plan: what to do.
        folder: staging folder.
        backend: who computes codes and scales.
        input_scales: static activation scale per on-disk module name, empty where none is stored.
        allow_zero_rows: store all-zero rows instead of refusing them.
        on_progress: called in this thread after each tensor.

    Raises:
        BackendError: a weight holds NaN, inf or an all-zero row, or the toolkit failed.
        CheckpointError: a source file shrank.
        OSError: writing failed.
    """
    source = plan.draft.checkpoint
    by_size = sorted(plan.steps, key=lambda s: (-s.bytes_before, s.row.tensor.name))
    with ExitStack() as stack:
        inputs = {file: _open(stack, source.folder / file) for file in source.headers}
        outputs = {
            file: stack.enter_context(_output_file(plan, folder, file)) for file in source.headers
        }
        pool = stack.enter_context(
            ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
        )

        def weight_of(step: Step) -> _Weight:
            return _Weight(step.row.tensor, inputs[step.row.tensor.file], allow_zero_rows)

        absmax = _shared_absmax(plan, pool, weight_of)

        def run(step: Step) -> Step:
            file, module = step.row.tensor.file, step.row.module
            if step.action == "keep":
                outputs[file].copy(inputs[file], step.row.tensor)
            else:
                _quantize(
                    weight_of(step),
                    plan.recipe,
                    backend,
                    outputs[file],
                    absmax=absmax.get(module),
                    input_scale=input_scales.get(module),
                )
            return step

        here = [s for s in by_size if s.action == "quantize" and not backend.streams_rows]
        futures = [pool.submit(run, step) for step in by_size if step not in here]
        try:
            for step in here:  # vendor toolkits change process state: never in a thread
                on_progress(run(step))
            _finish(futures, on_progress)
        finally:
            for future in futures:
                future.cancel()


def _finish(futures: list[Future[Step]], on_progress: Callable[[Step], None]) -> None:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
        for future in done:
            on_progress(future.result())


def _open(stack: ExitStack, path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _output_file(plan: Plan, folder: Path, file: str) -> SafetensorsFile:
    stored = [t for step in plan.steps if step.row.tensor.file == file for t in step.stored]
    return SafetensorsFile(folder / file, stored, plan.draft.checkpoint.headers[file].metadata)


class _Weight:
    """A source weight [rows, in_features], read block by block and checked before any cast."""

    def __init__(self, tensor: TensorInfo, descriptor: int, allow_zero_rows: bool) -> None:
        self.tensor = tensor
        self._descriptor = descriptor
        self._allow_zero_rows = allow_zero_rows

    def blocks(self, block_bytes: int) -> Iterator[Tensor]:
        """Consecutive blocks of rows; the buffer is reused, so use each before the next."""
        rows, columns = self.tensor.shape
        row_bytes = self.tensor.nbytes // max(rows, 1)
        fitting = block_bytes // max(row_bytes, 1)
        step = rows if fitting >= rows else min(rows, max(ROWS, fitting // ROWS * ROWS))
        buffer = torch.empty(step * row_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = view[: count * row_bytes]
            pread_exactly(
                self._descriptor, part, self.tensor.start + first * row_bytes, self.tensor.name
            )
            block = buffer[: count * row_bytes].view(DTYPES[self.tensor.dtype])
            yield block.view(count, columns)

    def checked_absmax(self, block: Tensor, first: int) -> Tensor:
        """Largest magnitude per row, [rows, 1], of a block that starts at row `first`."""
        absmax = row_absmax(block)
        bad = (~absmax.isfinite()).nonzero()
        if len(bad):
            raise BackendError(
                self.tensor.name,
                f"row {first + int(bad[0, 0])} holds NaN or inf: nothing to quantize",
                fix="repair the source checkpoint: this draft cannot have been served",
            )
        zero = (absmax == 0).nonzero()
        if len(zero) and not self._allow_zero_rows:
            raise BackendError(
                self.tensor.name,
                f"{len(zero)} all-zero row(s) from row {first + int(zero[0, 0])}: usually"
                " padding or a damaged export",
                fix="repair the source, or pass --allow-zero-rows to store them as they are",
            )
        return absmax


def _quantize(
    weight: _Weight,
    recipe: Recipe,
    backend: Backend,
    output: SafetensorsFile,
    *,
    absmax: Tensor | None,
    input_scale: float | None,
) -> None:
    """Stream one weight through the backend into the stored tensors of its layout."""
    layout = get_layout(recipe.layout)
    module = weight.tensor.name.removesuffix(".weight")
    block_bytes = BLOCK_BYTES if backend.streams_rows else weight.tensor.nbytes
    written: dict[str, int] = {}
    columns: dict[str, list[Tensor]] = {}
    first = 0
    block = QuantizedWeight(codes=torch.empty(0), scale=torch.empty(0))
    for rows in weight.blocks(block_bytes):
        if absmax is None:
            weight.checked_absmax(rows, first)
        block = backend.quantize(rows, recipe.weights, absmax)
        for name, data in layout.encode_rows(module, block, recipe.weights).items():
            if isinstance(data, Columns):
                columns.setdefault(name, []).append(data.tensor)
            else:
                offset = written.get(name, 0)
                written[name] = offset + output.write(name, data, offset=offset)
        first += len(rows)
    for name, parts in columns.items():
        output.write(name, torch.cat(parts, dim=1))
    for name, data in layout.encode_whole(weight.tensor, block, recipe, input_scale).items():
        output.write(name, data)


def _shared_absmax(
    plan: Plan, pool: ThreadPoolExecutor, weight_of: Callable[[Step], _Weight]
) -> dict[str, Tensor]:
    """What the one scale of each matrix must cover, by module; {} where rows have their own.

    Engines hold linears that they fuse under one scale: with several, NVFP4 is served wrongly and
    FP8 is rounded a second time. So they share the largest magnitude, as in ModelOpt's own export.
    """
    if not plan.recipe.weights.scales_whole_matrix:
        return {}
    found = pool.map(lambda step: _tensor_absmax(weight_of(step)), plan.quantized)
    modules = (step.row.module for step in plan.quantized)
    absmax = dict(zip(modules, found, strict=True))
    for group in plan.draft.fused_groups():
        if members := absmax.keys() & set(group):
            absmax |= dict.fromkeys(members, max(absmax[module] for module in members))
    return absmax


def _tensor_absmax(weight: _Weight) -> Tensor:
    """Largest magnitude of the whole weight, [1, 1]: a first pass over its blocks."""
    first, largest = 0, torch.zeros(1, 1)
    for rows in weight.blocks(BLOCK_BYTES):
        block = weight.checked_absmax(rows, first).amax(dim=0, keepdim=True)
        largest = torch.maximum(largest, block.float())
        first += len(rows)
    return largest
