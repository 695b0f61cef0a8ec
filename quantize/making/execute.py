"""Executing a plan: weights are read, quantized and stored in blocks, while the rest is copied.

Reading, arithmetic and writing overlap: threads take tensors, the largest first. Each thread needs
the memory of a few blocks of rows, or of one linear where a toolkit needs the whole weight.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...recipes.errors import BackendError
from ...recipes.schema import Recipe
from ..algorithms import InputMoments
from ..backends import Backend, get_backend
from ..files.checkpoint import pread_exactly
from ..files.safetensors_file import SafetensorsFile
from ..files.safetensors_header import TensorInfo
from ..layouts import get_layout
from ..layouts.layout import GatheredColumns, rows_of_block
from ..numerics.number_formats import row_absmax
from ..numerics.quantized_weight import TORCH_DTYPES, QuantizedWeight, carried
from ..planning.outputs import OpenOutputs, finish, largest_first, workers
from ..planning.quantization_plan import MeasuredInputs, Plan, Step


def row_blocks(
    descriptor: int, tensor: TensorInfo, *, block_bytes: int, multiple: int
) -> Iterator[Tensor]:
    """Blocks of a weight [rows, in_features] in one buffer, each of a multiple of some rows."""
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
        block = buffer[: count * row_bytes].view(TORCH_DTYPES[tensor.dtype])
        yield block.view(count, columns)


# The first linears of EAGLE-3 read [norm(embedding); norm(hidden)]. Multiplying the embedding's
# columns by 2^k and dividing the norm's weight by 2^k leaves the network as it is, bit for bit, and
# lets both halves share one scale per row.


def divide_norm(norm: Tensor, exponent: int, name: str) -> Tensor:
    """A norm's weight [width] divided by 2^exponent, which its dtype must hold exactly."""
    return _scaled(norm, -exponent, name)


def multiply_columns(rows: Tensor, exponent: int, name: str) -> None:
    """Multiply the first half of the columns of a block [rows, in_features] in place, exactly."""
    half = rows[:, : rows.shape[1] // 2]
    half.copy_(_scaled(half, exponent, name))


def _scaled(values: Tensor, exponent: int, name: str) -> Tensor:
    factor = torch.tensor(2.0**exponent, dtype=torch.float64)
    exact = values.double() * factor
    scaled = exact.to(values.dtype)
    if bool(((scaled.double() != exact) & exact.isfinite()).any()):
        raise BackendError(
            name,
            f"it cannot be multiplied by 2^{exponent} exactly in {values.dtype}, as balancing the"
            " two halves of the concatenated input requires",
            fix="use a recipe with 'balance_concat: off', or store the draft in float32",
        )
    return scaled


CPU = torch.device("cpu")
BLOCK_BYTES = 512 << 10
"""Size of a block of the source weight: with its float32 copies it fits the cache of a core."""
COLUMN_BLOCK_BYTES = 64 << 20
"""The same where columns are processed in order: longer blocks cost less per column."""
GPU_BLOCK_BYTES = 512 << 20
"""On a GPU: whole matrices except heads; GPTQ takes ten times as much memory."""
WRITE_BYTES = 4 << 20
"""Bytes of one write: the kernel lets one thread at a time write to a file; others wait."""


def execute(
    plan: Plan,
    run: OpenOutputs[Step],
    backend: Backend,
    *,
    measured: MeasuredInputs,
    exponents: Mapping[str, int],
    allow_zero_rows: bool,
    on_progress: Callable[[Step], None],
    device: torch.device = CPU,
) -> None:
    """Write what is not copied into the safetensors files of a plan, and wait for the copies.

    Args:
        exponents: for balanced norms and the linears after them: on-disk module -> k of 2^k.
        device: where codes are computed and packed, unless a vendor's toolkit computes them.
    """
    with workers() as pool:
        steps = _Execution(pool, plan, run, backend, measured, exponents, allow_zero_rows, device)
        steps.every_step(on_progress)
        finish(run.copies, on_progress)


@dataclass(slots=True)
class _Execution:
    pool: ThreadPoolExecutor
    plan: Plan
    run: OpenOutputs[Step]
    backend: Backend
    measured: MeasuredInputs
    exponents: Mapping[str, int]
    allow_zero_rows: bool
    device: torch.device
    absmax: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.device if self.backend.streams_rows else CPU
        self.absmax = self._shared_absmax()

    def every_step(self, on_progress: Callable[[Step], None]) -> None:
        """Run all steps at once; with moments, stage by stage, to hold only those of one stage."""
        statistics, codes = self.measured.statistics, self.measured.found
        if self.backend.needs == "none" or (self.backend.needs == "codes" and codes is not None):
            self._run_stage(self.plan.steps, on_progress)
            return
        assert statistics is not None  # `checked_measured` refused
        statistics.measure(self._names_of_need(self.plan.quantized))
        for stage in self.plan.stages():
            names = self._names_of_need([step for step in stage if step.action == "quantize"])
            self._run_stage(stage, on_progress, statistics.second_moments(names))

    def _backend_of(self, step: Step) -> Backend:
        """The recipe's backend; a plain one where that gains nothing or saw too few tokens."""
        recipe = self.plan.recipe_of(step)
        algorithm, statistics = recipe.algorithm, self.measured.statistics
        if statistics is not None and step.row.canonical_module in statistics.too_few:
            algorithm = algorithm.to_nearest
        if algorithm == self.plan.recipe.algorithm:
            return self.backend
        return get_backend(recipe.backend, algorithm)

    def _names_of_need(self, steps: Sequence[Step]) -> list[str]:
        return [s.row.canonical_module for s in steps if self._backend_of(s).needs != "none"]

    def _run_stage(
        self,
        stage: Sequence[Step],
        on_progress: Callable[[Step], None],
        moments: Mapping[str, InputMoments] = MappingProxyType({}),
    ) -> None:
        def run(step: Step) -> Step:
            self._step(step, moments.get(step.row.canonical_module))
            return step

        by_size = largest_first(s for s in stage if s.row.tensor.name not in self.run.copied)
        here = [s for s in by_size if s.action == "quantize" and not self.backend.streams_rows]
        futures = [self.pool.submit(run, step) for step in by_size if step not in here]
        for step in here:  # vendor toolkits change process state: never in a thread
            on_progress(run(step))
        finish(futures, on_progress)

    def _step(self, step: Step, moments: InputMoments | None) -> None:
        if step.action == "drop":
            return
        output = self.run.files[step.row.tensor.file]
        if step.action == "transform":
            self._write_norm(step, self.exponents[step.row.module])
        elif step.action == "learn":
            codes = self.measured.found
            assert codes is not None  # `every_step` has checked it
            output.write(step.row.tensor.name, codes.weight(step.row.canonical_module))
        else:
            blocks = self._quantized_blocks(step, moments)
            input_scale = self.measured.input_scales.get(step.row.module)
            recipe = self.plan.recipe_of(step).stored
            store_linear(blocks, step.row.tensor, recipe, output, input_scale)

    def _write_norm(self, step: Step, exponent: int) -> None:
        tensor = step.row.tensor
        as_row = replace(tensor, shape=(1, tensor.numel))
        source = self.run.inputs[tensor.file]
        (norm,) = row_blocks(source, as_row, block_bytes=tensor.nbytes, multiple=1)
        self.run.files[tensor.file].write(tensor.name, divide_norm(norm, exponent, tensor.name))

    def _blocks(self, step: Step, block_bytes: int) -> Iterator[Tensor]:
        tensor = step.row.tensor
        exponent = self.exponents.get(step.row.module, 0)
        source = self.run.inputs[tensor.file]
        multiple = rows_of_block(self.plan.format_of(step).weights)
        for rows in row_blocks(source, tensor, block_bytes=block_bytes, multiple=multiple):
            if exponent:
                multiply_columns(rows, exponent, tensor.name)
            yield rows

    def _quantized_blocks(
        self, step: Step, moments: InputMoments | None
    ) -> Iterator[QuantizedWeight]:
        tensor, weights = step.row.tensor, self.plan.format_of(step).weights
        backend = self._backend_of(step)
        absmax = self.absmax.get(step.row.module)
        absmax = None if absmax is None else absmax.to(self.device)
        whole = self._found(step) if backend.needs == "codes" else None
        first = 0
        block_bytes = BLOCK_BYTES if moments is None else COLUMN_BLOCK_BYTES
        if self.device != CPU and whole is None:
            block_bytes = GPU_BLOCK_BYTES
        for rows in self._blocks(step, block_bytes if backend.streams_rows else tensor.nbytes):
            if absmax is None:
                self._checked_absmax(rows, tensor.name, first)
            if whole is None:
                block = backend.quantize(rows.to(self.device), weights, absmax, moments)
            else:
                block = whole.block(slice(first, first + len(rows)))
            yield carried(block) if weights.carrier else block
            first += len(rows)

    def _found(self, step: Step) -> QuantizedWeight:
        codes, tensor = self.measured.found, step.row.tensor
        assert codes is not None  # `every_step` has checked it
        whole = codes.quantized(step.row.canonical_module)
        if tuple(whole.codes.shape) != tensor.shape:
            raise BackendError(
                tensor.name,
                f"expected codes {list(tensor.shape)}, found were {list(whole.codes.shape)}",
                fix="learn them of this draft",
            )
        return whole

    def _checked_absmax(self, rows: Tensor, name: str, first: int) -> Tensor:
        """Largest magnitude per row, [rows, 1], of a block that starts at row `first`."""
        absmax = row_absmax(rows)
        bad = (~absmax.isfinite()).nonzero()
        if len(bad):
            raise BackendError(
                name,
                f"row {first + int(bad[0, 0])} holds NaN or inf: nothing to quantize",
                fix="repair the source checkpoint: this draft cannot have been served",
            )
        zero = (absmax == 0).nonzero()
        if len(zero) and not self.allow_zero_rows:
            raise BackendError(
                name,
                f"{len(zero)} all-zero row(s) from row {first + int(zero[0, 0])}: usually padding"
                " or a damaged export",
                fix="repair the source, or pass --allow-zero-rows to store them as they are",
            )
        return absmax

    def _shared_absmax(self) -> dict[str, Tensor]:
        """What the one scale of each matrix must cover, by module; {} where every row has its own.

        Engines keep linears that they fuse under one scale: with several scales they serve NVFP4
        wrongly and round FP8 a second time. So the linears share the largest magnitude, as they do
        in ModelOpt's own export.
        """
        plan = self.plan
        steps = [s for s in plan.quantized if plan.format_of(s).weights.scales_whole_matrix]
        largest = self.pool.map(self._matrix_absmax, steps)
        modules = (step.row.module for step in steps)
        absmax = dict(zip(modules, largest, strict=True))
        for group in plan.draft.scale_groups():
            if members := absmax.keys() & set(group):
                absmax |= dict.fromkeys(members, max(absmax[module] for module in members))
        return absmax

    def _matrix_absmax(self, step: Step) -> Tensor:
        """Largest magnitude of the whole weight, [1, 1]: a first pass over its blocks."""
        first, largest = 0, torch.zeros(1, 1)
        for rows in self._blocks(step, BLOCK_BYTES):
            absmax = self._checked_absmax(rows, step.row.tensor.name, first)
            largest = torch.maximum(largest, absmax.amax(dim=0, keepdim=True).float())
            first += len(rows)
        return largest


def store_linear(
    blocks: Iterator[QuantizedWeight],
    weight: TensorInfo,
    recipe: Recipe,
    output: SafetensorsFile,
    input_scale: float | None,
) -> None:
    """Write a quantized weight in the form that the layout of a `Recipe.stored` has."""
    layout = get_layout(recipe.layout)
    module = weight.name.removesuffix(".weight")
    gathered: dict[str, _Rows] = {}
    columns: dict[str, list[Tensor]] = {}
    block = QuantizedWeight(codes=torch.empty(0), scale=torch.empty(0))
    for block in blocks:
        for name, data in layout.encode_rows(module, block, recipe.weights).items():
            if isinstance(data, GatheredColumns):
                columns.setdefault(name, []).append(data.tensor)
            else:
                gathered.setdefault(name, _Rows(output, name)).add(data)
    for rows in gathered.values():
        rows.write()
    for name, parts in columns.items():
        output.write(name, torch.cat(parts, dim=1))
    for name, data in layout.encode_whole(weight, block, recipe, input_scale).items():
        output.write(name, data)


class _Rows:
    """Rows of a stored tensor, in order; a number of them is gathered before each write."""

    def __init__(self, output: SafetensorsFile, name: str) -> None:
        self._output, self._name = output, name
        self._parts: list[Tensor] = []
        self._nbytes = self._offset = 0

    def add(self, rows: Tensor) -> None:
        """Take the next rows."""
        self._parts.append(rows.contiguous().reshape(-1).view(torch.uint8))
        self._nbytes += rows.nbytes
        if self._nbytes >= WRITE_BYTES:
            self.write()

    def write(self) -> None:
        """Write the rows gathered so far."""
        if self._parts:
            written = self._output.write(self._name, torch.cat(self._parts), offset=self._offset)
            self._offset += written
            self._parts, self._nbytes = [], 0
