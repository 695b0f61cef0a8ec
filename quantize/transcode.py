"""`transcode_draft`: the same codes and scales in another layout or carrier, bit for bit.

No weight is rounded anew and no source is needed: what was quantized once, and judged, is written
as another engine wants it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..recipes.formats import NUMBER_FORMATS
from ..recipes.schema import LayoutName, Recipe, WeightFormat
from .drafts import Row
from .drafts.runtime_names import excluded_modules, known_target_layers
from .errors import CheckpointError, LayoutError
from .execute import store_linear
from .files.checkpoint import CONFIG_FILE, Checkpoint
from .files.hub import DraftSource
from .files.provenance import TranscodedFrom, read_provenance, transcoded
from .files.publish import check_faults, publish
from .files.safetensors_file import SafetensorsFile
from .files.safetensors_header import StoredTensor, TensorInfo
from .files.side_files import check_no_other_weights, config_and_index
from .layouts import check_layout, get_layout
from .numerics.quantized_weight import QuantizedWeight, carried
from .stored.declarations import raw_declaration
from .stored.draft import StoredDraft
from .stored.formats import formats_of
from .stored.linear import StoredLinear, global_scale
from .verify.companions import stored_scalar
from .verify.dequantized import QUANTIZED_ONLY, check_unchanged
from .verify.scales import stored_scales
from .verify.transcoded import TranscodedReport, verify_transcoded

CarrierChoice = Literal["fp8_e4m3", "none"]

_BLOCK = 2**21  # codes: a few float32 arrays of them are some tens of megabytes
_ROWS = 128  # see `layouts.base`
_SCALE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensors:
    """What one row of the draft becomes.

    Attributes:
        row: the weight; of a linear stored as codes, its dtype is that of its INT4 scales.
        stored: the tensors of the output.
    """

    row: Row
    stored: tuple[StoredTensor, ...]
    quantized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodePlan:
    """What a quantized folder becomes.

    Attributes:
        source: the folder whose codes these are.
        recipe: whose formats and layout the output has.
        origin: the formats in which the codes were found, for provenance.
        outputs: by name of the weight.
        excludes: modules that stay floating-point.
    """

    source: StoredDraft
    recipe: Recipe
    origin: TranscodedFrom
    outputs: tuple[OutputTensors, ...]
    excludes: tuple[str, ...]

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the output, headers not counted."""
        return sum(tensor.nbytes for output in self.outputs for tensor in output.stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodeReport:
    """What was written.

    Attributes:
        before, after: what the two folders declare.
        linears: that are stored as codes. kept: tensors copied byte for byte.
    """

    out: Path
    before: str
    after: str
    linears: int
    kept: int
    bytes_before: int
    bytes_after: int


def plan_transcoding(
    source: DraftSource,
    layout: LayoutName | None = None,
    carrier: CarrierChoice | None = None,
    *,
    target_layers: int | None = None,
) -> TranscodePlan:
    """What a quantized folder becomes in another layout or carrier. Reads headers only.

    Args:
        source: the quantized folder.
        layout: of the output; None = that of the folder.
        carrier: of INT4 codes per channel; "none" for their own format, None = as in the folder.
        target_layers: decoder layers of the target, for layouts whose excludes are whole names.

    Raises:
        CheckpointError: the folder is not quantized, or not as it declares.
        VerifyError: its declaration is not understood.
        LayoutError: the layout cannot hold these codes; names those that can.
    """
    checkpoint = Checkpoint.open(source.folder)
    if raw_declaration(checkpoint) is None:
        raise CheckpointError(
            checkpoint.folder / CONFIG_FILE,
            "declares no quantization_config: there are no codes",
            fix="give the output folder of `draftquant quantize`, or another quantized draft",
        )
    stored = StoredDraft.read(checkpoint)
    found, origin = formats_of(stored, read_provenance(checkpoint.folder), source)
    weights = found.weights
    if carrier is not None:
        weights = replace(weights, carrier=None if carrier == "none" else carrier)
    problem = weights.problem()
    if problem is not None:
        raise LayoutError(checkpoint.folder, problem, fix="leave --carrier out")
    recipe = replace(found, layout=layout or found.layout, weights=weights)
    if recipe.layout == "awq":  # whose scales are float16: written only if they are so exactly
        recipe = replace(recipe, weights=replace(weights, scale_dtype="float16"))
    check_layout(recipe)
    rows = stored.draft.rows
    kept = [row for row in stored.draft.linears() if row.module not in stored.modules]
    exact = get_layout(recipe.layout).exact_excludes
    layers = known_target_layers(checkpoint, target_layers) if exact else None
    return TranscodePlan(
        source=stored,
        recipe=recipe,
        origin=origin,
        outputs=tuple(_output(stored, recipe, row) for row in rows),
        excludes=excluded_modules(stored.draft, kept, target_layers=layers),
    )


def _output(stored: StoredDraft, recipe: Recipe, row: Row) -> OutputTensors:
    tensor = row.tensor
    if not stored.is_quantized(row):
        same = StoredTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
        return OutputTensors(row=row, stored=(same,), quantized=False)
    scale = next(t for suffix, t in stored.parts(row).items() if "scale" in suffix)
    row = replace(row, tensor=replace(tensor, dtype=scale.dtype))
    tensors = get_layout(recipe.layout).stored(row.tensor, recipe.stored)
    return OutputTensors(row=row, stored=tensors, quantized=True)


def transcode_draft(
    plan: TranscodePlan,
    out: Path,
    *,
    argv: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda _count: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> TranscodeReport:
    """Write the same codes as another layout stores them: write, verify by re-reading, rename.

    Args:
        plan: from `plan_transcoding`.
        out: folder to create.
        argv: the command line, for provenance.
        on_progress: called with the bytes of each tensor written.
        on_stage: called with "write" and "verify" when they begin.

    Raises:
        LayoutError: a scale is not exact in the dtype that the layout stores.
        CheckpointError: the source folder is not the one that its draftquant.json records.
        DraftQuantError: of the stage that failed; nothing is left behind.
    """
    checkpoint = plan.source.checkpoint
    side_files = [file for file in checkpoint.side_files() if file not in QUANTIZED_ONLY]
    check_no_other_weights(checkpoint.folder, side_files, travel="unchanged", made="transcoded")
    record = read_provenance(checkpoint.folder)

    def verified(staging: Path) -> TranscodedReport:
        found = verify_transcoded(plan.source, staging)
        check_faults(
            out,
            found.faults,
            fix="these codes and scales are not exact in this layout: choose another one",
        )
        if record is not None:
            check_unchanged(record.tensor_sha256, found.source_sha256, checkpoint.folder)
        return found

    found = publish(
        out,
        checkpoint,
        tensor_bytes=plan.bytes_after,
        write_tensors=lambda staging: _write(plan, staging, on_progress),
        side_files=side_files,
        documents=_documents(plan),
        verify=verified,
        provenance=lambda found: transcoded(
            record,
            plan.recipe,
            replace(plan.origin, tensor_sha256=found.source_sha256),
            tensor_sha256=found.output_sha256,
            bytes_after=plan.bytes_after,
            argv=argv,
        ),
        on_stage=on_stage,
    )
    return TranscodeReport(
        out=out,
        before=str(plan.source.scheme),
        after=found.scheme,
        linears=len(plan.source.modules),
        kept=len(plan.outputs) - len(plan.source.modules),
        bytes_before=checkpoint.nbytes,
        bytes_after=plan.bytes_after,
    )


def _write(plan: TranscodePlan, staging: Path, on_progress: Callable[[int], None]) -> None:
    """One tensor after the other, each file in the place of the source's."""
    checkpoint = plan.source.checkpoint
    files = sorted({output.row.tensor.file for output in plan.outputs})
    with ExitStack() as stack:
        inputs, targets = {}, {}
        for file in files:
            inputs[file] = os.open(checkpoint.folder / file, os.O_RDONLY)
            stack.callback(os.close, inputs[file])
            stored = [t for o in plan.outputs if o.row.tensor.file == file for t in o.stored]
            metadata = checkpoint.headers[file].metadata
            targets[file] = stack.enter_context(
                SafetensorsFile(staging / file, stored, metadata)
            )
        for output in plan.outputs:
            file = output.row.tensor.file
            if output.quantized:
                _write_linear(plan, output.row, targets[file])
            else:
                targets[file].copy(inputs[file], output.row.tensor)
            on_progress(sum(tensor.nbytes for tensor in output.stored))


def _write_linear(plan: TranscodePlan, row: Row, target: SafetensorsFile) -> None:
    linear = plan.source.linear(row)
    input_scale = _input_scale(plan, row)
    blocks = _blocks(plan, row, linear)
    store_linear(blocks, row.tensor, plan.recipe.stored, target, input_scale)


def _blocks(plan: TranscodePlan, row: Row, linear: StoredLinear) -> Iterator[QuantizedWeight]:
    """The stored codes and scales, block by block, as they would come from quantizing."""
    weights, scheme = plan.recipe.weights, plan.source.scheme
    assert scheme is not None  # a row that is stored quantized is declared
    carries = NUMBER_FORMATS[scheme.weight_dtype].kind == "float" and weights.dtype == "int4"
    scale = _scales(plan, row)
    over = None
    if NUMBER_FORMATS[weights.dtype].global_scale or weights.first_stage:
        over = torch.tensor(global_scale(plan.source.checkpoint, row.module))
    out_features, in_features = row.tensor.shape
    step = max(1, _BLOCK // in_features // _ROWS) * _ROWS
    for first in range(0, out_features, step):
        rows = range(first, min(first + step, out_features))
        block = QuantizedWeight(
            codes=_codes(linear, rows, weights, carries=carries),
            scale=_of_rows(scale, rows, weights),
            global_scale=over,
            group_size=weights.group_size,
        )
        yield carried(block) if weights.carrier else block


def _codes(
    linear: StoredLinear, rows: range, weights: WeightFormat, *, carries: bool
) -> Tensor:
    """Codes [rows, in_features] as `QuantizedWeight` has them."""
    stored = linear.bytes_of(rows)
    if weights.dtype == "int4":
        return torch.from_numpy(linear.codes(rows, stored)).to(torch.int8)
    raw = torch.from_numpy(stored.reshape(len(rows), -1))
    if weights.dtype == "fp8_e4m3":
        return raw.view(torch.float8_e4m3fn)
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def _of_rows(scale: Tensor, rows: range, weights: WeightFormat) -> Tensor:
    """The scales of a block of rows."""
    if weights.granularity == "tensor":
        return scale
    size = weights.group_size or 1 if weights.granularity == "block" else 1
    return scale[rows.start // size : -(-rows.stop // size)]


def _scales(plan: TranscodePlan, row: Row) -> Tensor:
    """All scales of a linear in the dtype that the layout stores.

    Raises:
        LayoutError: one is not exact in it.
    """
    scheme, weights = plan.source.scheme, plan.recipe.weights
    assert scheme is not None
    exact = torch.from_numpy(stored_scales(plan.source.checkpoint, scheme, row.module))
    if weights.dtype == "nvfp4":
        return exact.to(torch.float8_e4m3fn)
    if weights.dtype != "int4" or weights.carrier or weights.first_stage:
        return exact
    dtype = _SCALE_DTYPES["F16" if weights.scale_dtype else row.tensor.dtype]
    scale = exact.to(dtype)
    wrong = (scale.float() != exact).nonzero()
    if len(wrong):
        first = float(exact[tuple(wrong[0])])
        raise LayoutError(
            f"{row.module}: scales",
            f"{len(wrong)} of {exact.numel()} are not exact in {dtype}, first {first:.9g}: layout"
            f" {plan.recipe.layout} cannot hold them",
            fix="choose a layout that keeps their dtype, or quantize the BF16 draft for this one",
        )
    return scale


def _input_scale(plan: TranscodePlan, row: Row) -> float | None:
    """The stored static scale of a linear's input; None where there is none."""
    if not plan.recipe.needs_input_scales:
        return None
    checkpoint = plan.source.checkpoint
    for suffix, divides in (("input_scale", False), ("input_global_scale", True)):
        tensor = checkpoint.tensors.get(f"{row.module}.{suffix}")
        if tensor is not None:
            value = stored_scalar(checkpoint, tensor)
            return 1 / value if divides else value
    raise CheckpointError(
        checkpoint.folder,
        f"{row.module} has no stored input scale",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _documents(plan: TranscodePlan) -> dict[str, str]:
    """The layout's own files, the index, and config.json with the new declaration."""
    import json

    checkpoint, layout = plan.source.checkpoint, get_layout(plan.recipe.layout)
    declared = layout.declare(plan.recipe.stored, plan.excludes)
    own = {
        file: json.dumps(content, indent=2) + "\n"
        for file, content in layout.side_files(declared).items()
    }
    config = {**checkpoint.config, "quantization_config": declared}
    files = {t.name: output.row.tensor.file for output in plan.outputs for t in output.stored}
    return own | config_and_index(checkpoint, config, files, plan.bytes_after)
