"""`transcode_draft`: the same codes and scales in another layout or carrier, bit for bit.

No weight is rounded anew and no source is needed: what was judged is written for another engine.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

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
from ..files.checkpoint import CONFIG_FILE, UNVERIFIED_CONFIG_FILE, Checkpoint
from ..files.digests import algorithm_of
from ..files.hub import DraftSource
from ..files.provenance import (
    CutProvenance,
    Provenance,
    QuantizedProvenance,
    TranscodedFrom,
    TranscodedProvenance,
)
from ..files.provenance_file import check_recorded, check_seal, read_provenance, transcoded
from ..files.publish import Rewrite, check_no_other_weights, config_and_index, json_texts, publish
from ..files.safetensors_file import SafetensorsFile
from ..layouts import check_head, check_layout, get_layout, named_heads
from ..making.execute import store_linear
from ..making.folder_card import renewed_card
from ..planning.outputs import (
    ONLY_OF_CODES,
    OutputTensors,
    bytes_of,
    cache_outputs,
    copied,
    files_of,
    store_cache_scales,
    write_outputs,
)
from ..stored.layouts.scheme import FLOAT_DTYPES
from ..stored.stored_declaration import declared_scheme, scale_suffix
from ..stored.stored_draft import StoredDraft, activation_format, cache_scales, weight_format
from ..verify import Compared, check_faults, verify_transcoded
from .recode import (
    check_counts_from_the_middle,
    check_one_format,
    recoded_blocks,
    stored_input_scale,
)


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


class RecodedCache(NamedTuple):
    """The scales of an output: its tensors, see `cache_outputs`, and their numbers by name."""

    outputs: tuple[OutputTensors, ...]
    scales: Mapping[str, float]

    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        """Write those of one layer."""
        scales = {tensor.name: self.scales[tensor.name] for tensor in output.stored}
        store_cache_scales((output,), {output.row.tensor.file: file}, scales)


def recoded_cache(source: StoredDraft, recipe: Recipe) -> RecodedCache:
    """The scales of a folder as a recipe's layout stores them; none where it declares no cache."""
    outputs = cache_outputs(recipe, source.draft)
    if not outputs:
        return RecodedCache((), {})
    found = cache_scales(source.checkpoint, source.draft, source.scheme)
    names = [tensor.name for output in outputs for tensor in output.stored]
    scales = []
    for site in cache_sites(source.draft):
        own = found.get(site.layer, UNIT)
        for values in (own.k, own.v):
            if len(values) != 1:
                raise LayoutError(
                    source.checkpoint.folder,
                    f"layer {site.layer} has {len(values)} scales of its keys or values, one for"
                    " each head, and other layouts store one",
                    fix="export the draft with one scale per layer (strategy: tensor)",
                )
            scales.append(values[0])
    return RecodedCache(outputs, dict(zip(names, scales, strict=True)))


CarrierChoice = Literal["fp8_e4m3", "none"]
LAYOUT_NAMES: tuple[LayoutName, ...] = typing.get_args(LayoutName)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscodePlan:
    """What a quantized folder becomes; `origin`: the formats in which the codes were found."""

    source: StoredDraft
    recipe: Recipe
    origin: TranscodedFrom
    outputs: tuple[OutputTensors, ...]
    cache: RecodedCache
    excludes: tuple[str, ...]
    record: Provenance | None

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the output, headers not counted."""
        return bytes_of((*self.outputs, *self.cache.outputs))


def plan_transcoding(
    source: DraftSource,
    layout: LayoutName | None = None,
    carrier: CarrierChoice | None = None,
    *,
    target_layers: int | None = None,
) -> TranscodePlan:
    """What a quantized folder becomes in another layout or carrier.

    Reads headers, and of codes in other tools' layouts zero points and groups of inputs.

    Args:
        layout: of the output; None = that of the folder.
        carrier: of INT4 codes per channel; "none" for their own format, None = as in the folder.
        target_layers: decoder layers of the target, for layouts whose excludes are whole names.

    Raises:
        CheckpointError: the folder is not quantized, not as it declares, or was edited.
        LayoutError: the layout cannot hold these codes; names those that can.
    """
    checkpoint = Checkpoint.open(source.folder)
    if declared_scheme(checkpoint) is None:
        raise CheckpointError(
            checkpoint.folder / CONFIG_FILE,
            "there is nothing to transcode: it declares no quantization_config",
            fix="give the output folder of `draftquant quantize`, or another quantized draft",
        )
    stored = StoredDraft.read(checkpoint)
    record = read_provenance(checkpoint.folder)
    check_seal(checkpoint.folder, record)
    if isinstance(record, CutProvenance):
        raise CheckpointError(
            checkpoint.folder,
            f"its vocabulary was cut after it had been quantized ({record.cut})",
            fix="transcode first, then cut",
        )
    found = _recipe(stored, record, layout)
    check_counts_from_the_middle(stored)
    origin = _origin(record, found, stored, source)
    recipe = _wanted(found, origin, layout or found.layout, carrier)
    check_layout(recipe)
    rows = stored.draft.rows
    codes = [row for row in rows if stored.is_quantized(row)]
    kept = [row for row in stored.draft.linears() if row not in codes]
    exact = get_layout(recipe.layout).exact_excludes
    layers = known_target_layers(checkpoint, target_layers) if exact else None
    names = excluded_modules(stored.draft, kept, codes, whole_names=exact, target_layers=layers)
    return TranscodePlan(
        source=stored,
        recipe=recipe,
        origin=origin,
        outputs=tuple(_output(stored, recipe, row, origin.scale_dtype) for row in rows),
        cache=recoded_cache(stored, recipe),
        excludes=names,
        record=record,
    )


def _recipe(stored: StoredDraft, record: Provenance | None, layout: LayoutName | None) -> Recipe:
    """The recipe of the folder; of another tool's, one that says no more than its formats.

    Such a folder may have a layout that is only read: then it is of the wanted `layout` at once.
    """
    scheme = stored.scheme
    if scheme is None or not stored.modules:
        raise CheckpointError(
            stored.checkpoint.folder / CONFIG_FILE,
            "there is nothing to transcode: no linear is stored quantized",
            fix="quantize the draft first",
        )
    check_one_format(stored)
    if isinstance(record, QuantizedProvenance):
        return record.recipe
    weights = weight_format(stored, scheme)
    own = next((name for name in LAYOUT_NAMES if name == scheme.layout.name), layout)
    if own is None:
        raise LayoutError(
            stored.checkpoint.folder,
            f"its layout {scheme.layout.name} is read, but not written",
            fix="name the layout of the output, for example --layout compressed-tensors",
        )
    if isinstance(record, TranscodedProvenance):
        first = record.transcoded_from.weights
        if first.dtype != weights.dtype:  # its codes are carried by what is declared
            weights = replace(first, carrier="fp8_e4m3")
    cache = scheme.kv_cache and KvCacheFormat(dtype=scheme.kv_cache, scales="measured")
    return Recipe(
        schema_version=1,
        name="of-another-tool",
        summary="the formats of a folder that another tool made",
        loads_on=(),
        backend="torch",
        layout=own,
        weights=weights,
        activations=activation_format(scheme),
        algorithm=Algorithm(scale="absmax", rounding="nearest"),
        kv_cache=cache,
        rules=(Rule(role=("attention", "mlp"), action="quantize"),),
        expect=Expectation(quantized_per_layer=7),
        gate=GateChoice(policy="release"),
    )


def _wanted(
    found: Recipe, origin: TranscodedFrom, layout: LayoutName, carrier: CarrierChoice | None
) -> Recipe:
    """The same recipe in another layout or carrier.

    Scales that the layout has in one dtype only are written only if they are exact in it.
    """
    only = get_layout(layout).int4_scale_dtype if found.weights.number.is_integer else None
    scale_dtype = only or origin.weights.scale_dtype
    weights = replace(found.weights, scale_dtype=scale_dtype)
    if carrier is not None:
        weights = replace(weights, carrier=None if carrier == "none" else carrier)
    if problem := weights.problem():
        raise LayoutError(f"layout {layout}", problem, fix="choose another layout or carrier")
    return replace(found, layout=layout, weights=weights)


def _origin(
    record: Provenance | None, found: Recipe, stored: StoredDraft, source: DraftSource
) -> TranscodedFrom:
    before = None
    if isinstance(record, QuantizedProvenance | TranscodedProvenance):
        before = record.transcoded_from
    return TranscodedFrom(
        hub_id=source.hub_id,
        revision=source.revision,
        layout=stored.scheme.layout.name if stored.scheme else found.layout,
        weights=before.weights if before else found.weights,
        scale_dtype=before.scale_dtype if before else _scale_dtype(stored, found.weights),
    )


def _scale_dtype(stored: StoredDraft, weights: WeightFormat) -> str:
    """To which dtype the scales were rounded: as stored, but for carried ones, which are wider."""
    if weights.carrier:
        floats = [row.tensor.dtype for row in stored.draft.rows if not stored.is_quantized(row)]
        return "F16" if weights.scale_dtype else next(d for d in floats if d in FLOAT_DTYPES)
    row = next(row for row in stored.draft.rows if stored.is_quantized(row))
    scheme = stored.scheme_of(row)
    suffix = scale_suffix(scheme) if scheme else ""
    return stored.parts(row)[suffix].dtype


def _output(stored: StoredDraft, recipe: Recipe, row: Row, scale_dtype: str) -> OutputTensors:
    """Of a linear stored as codes, the row has the dtype of its INT4 scales."""
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
    """Write the same codes as another layout stores them: write, verify by re-reading, rename.

    `on_progress` is called with the bytes of each tensor written, `on_stage` with "write" and
    "verify".
    """
    checkpoint = plan.source.checkpoint
    side_files = [file for file in checkpoint.side_files() if file not in ONLY_OF_CODES]
    check_no_other_weights(checkpoint.folder, side_files, travel="unchanged", made="transcoded")

    transcoding = _Transcoding(
        out=out,
        folder=checkpoint.folder,
        tensor_bytes=plan.bytes_after,
        side_files=side_files,
        documents=_documents(plan)
        | renewed_card(plan.source, plan.record, plan.recipe, plan.bytes_after),
        plan=plan,
        argv=argv,
        on_progress=on_progress,
    )
    found = publish(transcoding, on_stage)
    return TranscodeReport(
        out=out,
        before=str(plan.source.scheme),
        after=str(found.scheme),
        linears=len(plan.source.modules),
        kept=len(plan.outputs) - len(plan.source.modules),
        bytes_before=checkpoint.nbytes,
        bytes_after=plan.bytes_after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transcoding(Rewrite[Compared]):
    plan: TranscodePlan
    argv: Sequence[str]
    on_progress: Callable[[int], None]

    @override
    def write_tensors(self, staging: Path) -> None:
        plan = self.plan
        source, outputs = plan.source.checkpoint, (*plan.outputs, *plan.cache.outputs)
        write_outputs(source, staging, outputs, self._write, on_progress=self.on_progress)

    def _write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        plan, row = self.plan, output.row
        if output in plan.cache.outputs:
            return plan.cache.write(output, file)
        blocks = recoded_blocks(plan.source, row, plan.recipe)
        input_scale = stored_input_scale(plan.source, row, plan.recipe)
        return store_linear(blocks, row.tensor, plan.recipe.stored, file, input_scale)

    @override
    def verify(self, staging: Path) -> Compared:
        plan = self.plan
        algorithm = algorithm_of(plan.record.digests if plan.record else {})
        sides = plan.source, staging
        found = verify_transcoded(*sides, config_file=UNVERIFIED_CONFIG_FILE, algorithm=algorithm)
        fix = (
            "choose another layout: this one cannot hold these quantized values and scales exactly"
        )
        check_faults(self.out, self.folder, found.faults, fix=fix)
        if plan.record is not None:
            check_recorded(self.folder, plan.record.digests, found.source_digests)
        return found

    @override
    def provenance(self, found: Compared) -> Provenance:
        plan = self.plan
        return transcoded(
            plan.record,
            plan.recipe,
            replace(plan.origin, tensor_digests=found.source_digests),
            tensor_digests=found.output_digests,
            bytes_after=plan.bytes_after,
            argv=self.argv,
        )


def _documents(plan: TranscodePlan) -> dict[str, str]:
    checkpoint, layout = plan.source.checkpoint, get_layout(plan.recipe.layout)
    heads = named_heads(plan.recipe, (o.row for o in plan.outputs if o.changed))
    declared = layout.declare(plan.recipe.stored, plan.excludes, heads)
    own = json_texts(layout.side_files(declared))
    config = {**checkpoint.config, "quantization_config": declared}
    files = files_of((*plan.outputs, *plan.cache.outputs))
    return own | config_and_index(checkpoint, config, files, plan.bytes_after)
