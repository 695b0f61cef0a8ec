"""`transcode_draft`: the same codes and scales in another layout or carrier, bit for bit.

No weight is rounded again and no source is needed: judged values are written for another engine.
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError, LayoutError
from ...recipes.formats import KvCacheFormat
from ...recipes.schema import (
    Algorithm,
    Expectation,
    GateChoice,
    LayoutName,
    Recipe,
    Rule,
    WeightFormat,
)
from ..drafts import Row
from ..drafts.draft_cache import UNIT, cache_sites
from ..drafts.runtime_names import excluded_modules, known_target_layers
from ..files import provenance as records
from ..files.checkpoint import Checkpoint
from ..files.hub import DraftSource
from ..files.provenance_file import check_seal, read_provenance, transcoded
from ..files.publish import check_no_other_weights, json_texts, publish
from ..files.safetensors_file import SafetensorsFile
from ..layouts import check_head, check_layout, get_layout, named_heads
from ..layouts.layout import rows_of_block
from ..numerics.quantized_weight import TORCH_DTYPES, QuantizedWeight, carried
from ..planning.outputs import OutputTensors, cache_outputs, copied
from ..stored.decoded_numbers import blocks_of, stored_scalar
from ..stored.layouts.scheme import FLOAT_DTYPES
from ..stored.linear import StoredLinear, global_scale, input_groups, stored_scales, zero_points
from ..stored.stored_declaration import INPUT_SCALES, INVERSE_INPUT_SCALE
from ..stored.stored_draft import StoredDraft, cache_scales, weight_format
from ..verify import Compared, verify_transcoded
from .execute import store_linear
from .folder_card import renewed_card
from .mxfp4_as_nvfp4 import as_nvfp4, global_scales, scales_below
from .rewriting import OutputPlan, OutputRewrite, quantized_source, side_files_without_codes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TranscodeReport(Brief):
    """A quantized draft, stored in another layout or dtype; `kept` tensors were copied.

    Attributes:
        out: the folder that was written.
        before: what the source declares.
        after: what the new folder declares.
        linears: number of quantized linears.
        kept: number of tensors that were copied byte for byte.
        bytes_before: bytes of the tensors of the source.
        bytes_after: bytes of the tensors that were written.
    """

    out: Path
    before: str
    after: str
    linears: int
    kept: int
    bytes_before: int
    bytes_after: int

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "out": self.out,
            "from": self.before,
            "to": self.after,
            "linears": self.linears,
            "size": f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)}",
        }


def _cache_scales(source: StoredDraft, outputs: Sequence[OutputTensors]) -> dict[str, float]:
    """Scales of a folder by the names of the output; LayoutError where heads have their own scales.

    `outputs` come from `cache_outputs`: none where the folder declares no cache format.
    """
    if not outputs:
        return {}
    by_layer = cache_scales(source.checkpoint, source.draft, source.scheme)
    names = [tensor.name for output in outputs for tensor in output.stored]
    scales = []
    for site in cache_sites(source.draft):
        pair = by_layer.get(site.layer, UNIT)
        for values in (pair.k, pair.v):
            if len(values) != 1:
                where = source.checkpoint.folder
                raise LayoutError(
                    where,
                    f"layer {site.layer} has {len(values)} scales of its keys or values, one for"
                    " each head, and other layouts store one",
                    fix="export the draft with one scale per layer (strategy: tensor)",
                )
            scales.append(values[0])
    return dict(zip(names, scales, strict=True))


CarrierChoice = Literal["fp8_e4m3", "nvfp4", "none"]
LAYOUT_NAMES: tuple[LayoutName, ...] = typing.get_args(LayoutName)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodePlan(OutputPlan):
    """What a quantized folder becomes; `origin`: the formats in which the codes were stored.

    `global_scales`: by module, where MXFP4 becomes NVFP4.
    """

    recipe: Recipe
    origin: records.TranscodedFrom
    cache_scales: Mapping[str, float]
    global_scales: Mapping[str, float]
    excludes: tuple[str, ...]
    record: records.Provenance | None


def plan_transcoding(
    source: DraftSource,
    layout: LayoutName | None,
    carrier: CarrierChoice | None = None,
    *,
    target_layers: int | None = None,
) -> TranscodePlan:
    """What a quantized folder becomes in another layout or carrier; None = the folder's own.

    Reads headers; in other tools' layouts, zero points and groups of inputs; for NVFP4 all codes.

    Args:
        carrier: the carrier of INT4 codes per channel; "none" for their own format; "nvfp4" for
            MXFP4.
        target_layers: decoder layers of the target, for layouts whose excludes are whole names.

    Raises:
        CheckpointError: the folder is not quantized, contradicts its declaration, or was edited.
        LayoutError: the layout cannot hold these codes; names the layouts that can.
        PlanError: the layout needs `target_layers`.
    """
    checkpoint = Checkpoint.open(source.folder)
    stored = quantized_source(checkpoint, "transcode")
    record = read_provenance(checkpoint.folder)
    check_seal(checkpoint.folder, record)
    if isinstance(record, records.CutProvenance):
        raise CheckpointError(
            checkpoint.folder,
            f"its vocabulary was cut after it had been quantized ({record.cut})",
            fix="transcode first, then cut",
        )
    read = _recipe(stored, record, layout)
    _check_counts_from_the_middle(stored)
    origin = _origin(record, read, stored, source)
    recipe = _wanted(read, origin, layout or read.layout, carrier)
    check_layout(recipe)
    rows = stored.draft.rows
    codes = [row for row in rows if stored.is_quantized(row)]
    becomes_nvfp4 = (read.weights.dtype, recipe.weights.dtype) == ("mxfp4", "nvfp4")
    kept = [row for row in stored.draft.linears() if row not in codes]
    exact = get_layout(recipe.layout).exact_excludes
    layers = known_target_layers(checkpoint, target_layers) if exact else None
    names = excluded_modules(stored.draft, kept, codes, whole_names=exact, target_layers=layers)
    cache = cache_outputs(recipe, stored.draft)
    return TranscodePlan(
        source=stored,
        recipe=recipe,
        origin=origin,
        outputs=(*(_output(stored, recipe, row, origin.scale_dtype) for row in rows), *cache),
        cache_scales=_cache_scales(stored, cache),
        global_scales=global_scales(stored, codes) if becomes_nvfp4 else {},
        excludes=names,
        record=None if becomes_nvfp4 else record,
    )


def _recipe(
    stored: StoredDraft, record: records.Provenance | None, layout: LayoutName | None
) -> Recipe:
    """The recipe of the folder; for another tool's, one that says only its formats.

    If the folder has a layout that is only read, the recipe has the wanted `layout` at once.
    """
    scheme = stored.scheme
    assert scheme is not None  # `quantized_source` refused
    _check_one_format(stored)
    if isinstance(record, records.QuantizedProvenance):
        return record.recipe
    weights = weight_format(stored, scheme)
    layout_name = next((name for name in LAYOUT_NAMES if name == scheme.layout.name), layout)
    if layout_name is None:
        where = stored.checkpoint.folder
        raise LayoutError(
            where,
            f"its layout {scheme.layout.name} is read, but not written",
            fix="name the layout of the output, for example --layout compressed-tensors",
        )
    if isinstance(record, records.TranscodedProvenance):
        first = record.transcoded_from.weights
        if first.number.is_integer and not weights.number.is_integer:  # the carrier of its codes
            weights = replace(first, carrier="fp8_e4m3")
    cache = scheme.kv_cache and KvCacheFormat(dtype=scheme.kv_cache, scales="measured")
    return Recipe(
        schema_version=1,
        name="of-another-tool",
        summary="the formats of a folder that another tool made",
        backend="torch",
        layout=layout_name,
        weights=weights,
        activations=scheme.activation_format(),
        algorithm=Algorithm(scale="absmax", rounding="nearest"),
        kv_cache=cache,
        rules=(Rule(role=("attention", "mlp"), action="quantize"),),
        expect=Expectation(quantized_per_layer=7),
        gate=GateChoice(policy="release"),
    )


def _wanted(
    read: Recipe, origin: records.TranscodedFrom, layout: LayoutName, carrier: CarrierChoice | None
) -> Recipe:
    """The same recipe in another layout or carrier.

    Where the layout has one dtype for scales, they must be exact in it to be written.
    """
    only = get_layout(layout).int4_scale_dtype if read.weights.number.is_integer else None
    scale_dtype = only or origin.weights.scale_dtype
    weights = replace(read.weights, scale_dtype=scale_dtype)
    if carrier == "nvfp4":
        weights = as_nvfp4(read)
    elif carrier is not None:
        weights = replace(weights, carrier=None if carrier == "none" else carrier)
    if problem := weights.problem():
        raise LayoutError(f"layout {layout}", problem, fix="choose another layout or carrier")
    return replace(read, layout=layout, weights=weights)


def _origin(
    record: records.Provenance | None, read: Recipe, stored: StoredDraft, source: DraftSource
) -> records.TranscodedFrom:
    before = None
    if isinstance(record, records.QuantizedProvenance | records.TranscodedProvenance):
        before = record.transcoded_from
    return records.TranscodedFrom(
        hub_id=source.hub_id,
        revision=source.revision,
        layout=stored.scheme.layout.name if stored.scheme else read.layout,
        weights=before.weights if before else read.weights,
        scale_dtype=before.scale_dtype if before else _scale_dtype(stored, read.weights),
        tensor_digests={},  # verification finds them
    )


def _scale_dtype(stored: StoredDraft, weights: WeightFormat) -> str:
    """The dtype to which scales were rounded: the stored one, or a narrower one if carried."""
    if weights.carrier:
        floats = [row.tensor.dtype for row in stored.draft.rows if not stored.is_quantized(row)]
        return "F16" if weights.scale_dtype else next(d for d in floats if d in FLOAT_DTYPES)
    row = next(row for row in stored.draft.rows if stored.is_quantized(row))
    scheme = stored.scheme_of(row)
    suffix = scheme.layout.scale_suffix(scheme) if scheme else ""
    return stored.parts(row)[suffix].dtype


def _output(stored: StoredDraft, recipe: Recipe, row: Row, scale_dtype: str) -> OutputTensors:
    """For a linear stored as codes, the row has the dtype of its INT4 scales."""
    if not stored.is_quantized(row):
        return copied(row)
    row = replace(row, tensor=replace(row.tensor, dtype=scale_dtype))
    check_head(recipe.stored, row)
    tensors = get_layout(recipe.layout).stored(row.tensor, recipe.stored)
    return OutputTensors(row=row, stored=tensors, changed=True)


def transcode_draft(
    plan: TranscodePlan,
    out: Path,
    *,
    argv: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda _count: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> TranscodeReport:
    """Write the same codes in another layout: write, verify by re-reading, rename."""
    checkpoint = plan.source.checkpoint
    side_files = side_files_without_codes(checkpoint)
    check_no_other_weights(checkpoint.folder, side_files, travel="unchanged", made="transcoded")
    transcoding = _Transcoding(
        out=out,
        folder=checkpoint.folder,
        tensor_bytes=plan.bytes_after,
        side_files=side_files,
        documents=_documents(plan)
        | renewed_card(plan.source, plan.record, plan.recipe, plan.bytes_after),
        plan=plan,
        record=plan.record,
        argv=argv,
        on_progress=on_progress,
    )
    comparison = publish(transcoding, on_stage)
    return TranscodeReport(
        out=out,
        before=str(plan.source.scheme),
        after=str(comparison.scheme),
        linears=len(plan.source.modules),
        kept=sum(not output.changed for output in plan.outputs),
        bytes_before=checkpoint.nbytes,
        bytes_after=plan.bytes_after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transcoding(OutputRewrite[Compared]):
    fix = "choose another layout: this one cannot hold these quantized values and scales exactly"
    plan: TranscodePlan

    @override
    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        plan, row = self.plan, output.row
        cached = [tensor for tensor in output.stored if tensor.name in plan.cache_scales]
        for tensor in cached:
            file.write(tensor.name, torch.full(tensor.shape, plan.cache_scales[tensor.name]))
        if not cached:
            over = plan.global_scales.get(row.module)
            blocks = _recoded_blocks(plan.source, row, plan.recipe, over)
            input_scale = _stored_input_scale(plan.source, row, plan.recipe)
            store_linear(blocks, row.tensor, plan.recipe.stored, file, input_scale)

    @override
    def compared(self, staging: Path, **how: Any) -> Compared:
        return verify_transcoded(self.plan.source, staging, **how)

    @override
    def provenance(self, verification: Compared) -> records.Provenance:
        plan = self.plan
        return transcoded(
            plan.record,
            plan.recipe,
            replace(plan.origin, tensor_digests=verification.source_digests),
            tensor_digests=verification.output_digests,
            bytes_after=plan.bytes_after,
            argv=self.argv,
        )


def _documents(plan: TranscodePlan) -> dict[str, str]:
    layout = get_layout(plan.recipe.layout)
    heads = named_heads(plan.recipe, (o.row for o in plan.outputs if o.changed))
    declared = layout.declare(plan.recipe.stored, plan.excludes, heads)
    config = {**plan.source.checkpoint.config, "quantization_config": declared}
    return json_texts(layout.side_files(declared)) | plan.documents(config)


_BLOCK = 2**18  # codes: a few float32 arrays of this size fit the cache of a core


def _check_one_format(source: StoredDraft) -> None:
    """Fail for a folder with several formats."""
    scheme = source.scheme
    groups = (scheme, *scheme.others) if scheme is not None else ()
    if len({replace(each, targets=(), others=(), excludes=()) for each in groups}) > 1:
        where = source.checkpoint.folder
        raise LayoutError(
            where,
            "expected one format for all linears, got several, which no other layout holds:"
            f" {source.scheme}",
            fix="quantize the BF16 draft with a recipe of the wanted layout",
        )


def _check_counts_from_the_middle(source: StoredDraft) -> None:
    """LayoutError for the first linear whose codes no layout of this package holds."""
    for row in source.draft.rows:
        scheme = source.scheme_of(row)
        if scheme is None:
            continue
        (rows, columns), of = row.tensor.shape, (source.checkpoint, scheme, row.module)
        asymmetric = zero_points(*of, rows) is not None
        if asymmetric or input_groups(*of, columns) is not None:
            what = "asymmetric codes" if asymmetric else "inputs in the order of their activations"
            raise LayoutError(
                f"{row.module}: {what}",
                "no layout that draftquant writes holds them",
                fix="`draftquant dequantize` the folder, and quantize the weights with a recipe",
            )


def _recoded_blocks(
    source: StoredDraft, row: Row, recipe: Recipe, under: float | None
) -> Iterator[QuantizedWeight]:
    """The codes and scales of a linear, block by block, as if they came from quantizing.

    `under`: the global scale, where MXFP4 becomes NVFP4.

    The dtype of the row is that of its INT4 scales; LayoutError where a scale is not exact in it.
    """
    weights, linear = recipe.weights, source.linear(row)
    over: Tensor | None = None
    if under is not None:
        over = torch.tensor(under)
        scale = scales_below(source, row, over)
    else:
        scale = _scales(source, row, recipe, linear)
    if under is None and (weights.number.global_scale or weights.first_stage):
        over = torch.tensor(global_scale(source.checkpoint, row.module))
    out_features, in_features = row.tensor.shape
    multiple = rows_of_block(weights)
    step = max(1, _BLOCK // in_features // multiple) * multiple
    for rows in blocks_of(out_features, step):
        block = QuantizedWeight(
            codes=_codes(linear, rows, weights),
            scale=_of_rows(scale, rows, weights),
            global_scale=over,
            group_size=weights.group_size,
        )
        yield carried(block) if weights.carrier else block


def _stored_input_scale(source: StoredDraft, row: Row, recipe: Recipe) -> float | None:
    """The static scale of a linear's input; None where the recipe has none."""
    if not recipe.needs_input_scales:
        return None
    for suffix in INPUT_SCALES:
        tensor = source.checkpoint.tensors.get(f"{row.module}.{suffix}")
        if tensor is not None:
            value = stored_scalar(source.checkpoint, tensor)
            return 1 / value if suffix == INVERSE_INPUT_SCALE else value
    where = source.checkpoint.folder
    raise CheckpointError(
        where,
        f"{row.module} has no stored input scale",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _codes(linear: StoredLinear, rows: range, weights: WeightFormat) -> Tensor:
    """Codes [rows, in_features] as in `QuantizedWeight`; carried ones are INT4 again."""
    stored = linear.bytes_of(rows)
    if weights.number.is_integer:
        return torch.from_numpy(linear.codes(rows, stored)).to(torch.int8)
    raw = torch.from_numpy(stored.reshape(len(rows), -1))
    if weights.number.is_fp8:
        return raw.view(torch.float8_e4m3fn)
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def _of_rows(scale: Tensor, rows: range, weights: WeightFormat) -> Tensor:
    if weights.granularity == "tensor":
        return scale
    size = weights.group_size or 1 if weights.granularity == "block" else 1
    return scale[rows.start // size : -(-rows.stop // size)]


def _scales(source: StoredDraft, row: Row, recipe: Recipe, linear: StoredLinear) -> Tensor:
    """All scales of a linear in the dtype that the layout stores, [rows or blocks, groups]."""
    weights = recipe.weights
    if weights.granularity == "tensor":
        return torch.from_numpy(linear.scale)
    scheme = source.needed_scheme(row)
    exact = torch.from_numpy(stored_scales(source.checkpoint, scheme, row.module))
    if weights.number.global_scale:
        return exact.to(torch.float8_e4m3fn)
    if not weights.number.is_integer or weights.carrier or weights.first_stage:
        return exact
    dtype = TORCH_DTYPES["F16" if weights.scale_dtype else row.tensor.dtype]
    scale = exact.to(dtype)
    wrong = (scale != exact).nonzero()
    if len(wrong):
        first = float(exact[tuple(wrong[0])])
        where = f"{row.module}: scales"
        raise LayoutError(
            where,
            f"{len(wrong)} of {exact.numel()} are not exact in {dtype}, first {first:.9g}: layout"
            f" {recipe.layout} cannot hold them",
            fix="choose a layout that keeps their dtype, or quantize the BF16 draft for this one",
        )
    return scale
