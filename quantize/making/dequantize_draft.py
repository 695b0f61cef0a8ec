"""`dequantize_draft`: a quantized folder in, a folder of plain weights out, verified bit by bit.

The result has only weights: the rounding of activations is lost.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.errors import CheckpointError
from ...recipes.packages import package_version
from ..files import provenance as records
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.hub import DraftSource, recorded_argv
from ..files.provenance_file import check_seal, read_provenance
from ..files.publish import check_no_other_weights, publish
from ..files.safetensors_file import SafetensorsFile
from ..files.safetensors_header import FloatDtype, StoredTensor
from ..numerics.quantized_weight import rounded
from ..planning.outputs import OutputTensors, copied
from ..stored.linear import decoded_blocks
from ..stored.stored_draft import StoredDraft, cache_scales
from ..verify import Compared, DequantizedLinear, verify_dequantized
from .folder_card import plain_card
from .rewriting import OutputPlan, OutputRewrite, quantized_source, side_files_without_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizePlan(OutputPlan):
    """Every tensor of the output, by name, and the dtype of the dequantized ones."""

    dtype: FloatDtype


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DequantizeReport(Brief):
    """A dequantized draft, and what rounding lost; bytes are those of tensors, before and after.

    Attributes:
        out: the folder that was written.
        scheme: the scheme that the source declares.
        dtype: the dtype of the dequantized weights.
        kept: number of tensors that were copied byte for byte.
        linears: the dequantized linears.
        bytes_before: bytes of the tensors of the source.
        bytes_after: bytes of the tensors that were written.
    """

    out: Path
    scheme: str
    dtype: FloatDtype
    kept: int
    linears: tuple[DequantizedLinear, ...]
    bytes_before: int
    bytes_after: int

    @property
    def elements(self) -> int:
        """Number of dequantized weights."""
        return sum(linear.elements for linear in self.linears)

    @property
    def rounded(self) -> int:
        """Dequantized weights that differ from the float32 product of quantized value and scale."""
        return sum(linear.rounded for linear in self.linears)

    @property
    def max_relative_difference(self) -> float:
        """The largest relative difference that rounding made, over all linears."""
        return max(linear.max_relative_difference for linear in self.linears)

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "out": self.out,
            "from": self.scheme,
            "dtype": self.dtype,
            "linears": len(self.linears),
            "rounded weights": f"{self.rounded:,} of {self.elements:,}",
            "size": f"{megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)}",
        }


def plan_dequantization(checkpoint: Checkpoint, dtype: FloatDtype | None) -> DequantizePlan:
    """What a quantized folder becomes, in `dtype` or that of its floats; reads only headers.

    CheckpointError: not quantized, not as declared, or the weights that it keeps mix dtypes.
    """
    source = quantized_source(checkpoint, "dequantize")
    chosen = _kept_dtype(source) if dtype is None else dtype
    outputs = []
    for row in source.draft.rows:
        plain = StoredTensor(name=row.tensor.name, dtype=chosen, shape=row.tensor.shape)
        changed = OutputTensors(row=row, stored=(plain,), changed=True)
        outputs.append(changed if source.is_quantized(row) else copied(row))
    return DequantizePlan(source=source, dtype=chosen, outputs=tuple(outputs))


def _kept_dtype(source: StoredDraft) -> FloatDtype:
    """The one dtype of the floating-point tensors that are not quantized, except a router's."""
    plain = (row for row in source.draft.rows if not source.is_quantized(row))
    kept = {row.tensor.dtype for row in plain if row.role != "router"}
    floats: list[FloatDtype] = [d for d in typing.get_args(FloatDtype) if d in kept]
    if len(floats) != 1:
        where, got = source.checkpoint.folder, " and ".join(floats) or "none"
        raise CheckpointError(
            where,
            f"expected kept weights of one dtype, got {got}",
            fix="choose the dtype of the dequantized ones: --dtype bfloat16 or --dtype float32",
        )
    return floats[0]


def dequantize_draft(
    source: DraftSource,
    out: Path,
    *,
    dtype: FloatDtype | None = None,
    argv: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda _count: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> DequantizeReport:
    """Write the dequantized weights of a quantized folder: write, verify by re-reading, rename.

    Every quantized linear becomes one `NAME.weight` of its unquantized shape, the float32 product
    code * scale rounded to nearest even; all other tensors and side files keep their bytes.
    """
    checkpoint = source.checkpoint()
    plan = plan_dequantization(checkpoint, dtype)
    cache_scales(checkpoint, plan.source.draft, plan.source.scheme)  # dropped, if not damaged
    side_files, card = plain_card(checkpoint.folder, side_files_without_codes(checkpoint))
    travel = "beside the dequantized ones"
    check_no_other_weights(checkpoint.folder, side_files, travel=travel, made="dequantized")
    record = read_provenance(checkpoint.folder)
    check_seal(checkpoint.folder, record)
    if isinstance(record, records.GraftedProvenance):
        record = record.quantized_by  # the record of the layer inside its target
    if isinstance(record, records.DequantizedProvenance):
        where = checkpoint.folder / PROVENANCE_FILE
        raise CheckpointError(
            where,
            f"the folder was dequantized, but its {CONFIG_FILE} declares codes",
            fix="copy or quantize the draft again",
        )
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    dequantization = _Dequantization(
        out=out,
        folder=checkpoint.folder,
        tensor_bytes=plan.bytes_after,
        side_files=side_files,
        documents=plan.documents(config) | card,
        plan=plan,
        source=source,
        argv=argv,
        record=record,
        on_progress=on_progress,
    )
    return dequantization.report(publish(dequantization, on_stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dequantization(OutputRewrite[Compared]):
    fix = "run again; if it stays, report this with the folder's config.json"
    plan: DequantizePlan
    source: DraftSource
    record: (
        records.QuantizedProvenance | records.TranscodedProvenance | records.CutProvenance | None
    )

    @override
    def write(self, output: OutputTensors, file: SafetensorsFile) -> None:
        linear, (stored,) = self.plan.source.linear(output.row), output.stored
        offset = 0
        for rows in decoded_blocks(output.row.tensor):
            product = linear.decoded(rows).dequantized()
            weights = rounded(product, self.plan.dtype, stored.name, rows.start)
            offset += file.write(stored.name, weights, offset=offset)

    @override
    def compared(self, staging: Path, **how: Any) -> Compared:
        return verify_dequantized(self.plan.source, staging, self.plan.dtype, **how)

    @override
    def provenance(self, verification: Compared) -> records.DequantizedProvenance:
        report = self.report(verification)
        return records.DequantizedProvenance(
            draftquant=package_version("draftquant"),
            argv=recorded_argv(self.argv),
            source=records.QuantizedSource(
                hub_id=self.source.hub_id,
                revision=self.source.revision,
                family=self.plan.source.draft.family.name,
                scheme=report.scheme,
                tensor_digests=verification.source_digests,
            ),
            dtype=report.dtype,
            rounding=records.Rounding(
                elements=report.elements,
                rounded=report.rounded,
                max_relative_difference=report.max_relative_difference,
            ),
            tensor_digests=verification.output_digests,
            tensor_bytes=records.TensorBytes(before=report.bytes_before, after=report.bytes_after),
            quantized_by=self.record,
        )

    def report(self, compared: Compared) -> DequantizeReport:
        return DequantizeReport(
            out=self.out,
            scheme=str(self.plan.source.scheme),
            dtype=self.plan.dtype,
            kept=len(self.plan.outputs) - len(compared.dequantized),
            linears=tuple(compared.dequantized),
            bytes_before=self.plan.source.checkpoint.nbytes,
            bytes_after=self.plan.bytes_after,
        )
