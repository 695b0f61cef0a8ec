"""`dequantize_draft`: a quantized folder in, a folder of plain weights out, verified bit by bit.

Engines without a kernel for a format can serve the result, and accept what the format's weights
make them accept. It holds weights only: the rounding of activations is not in it.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dequantize_plan import DequantizePlan, OutputTensor, plan_dequantization
from .errors import CheckpointError, VerifyError
from .files.checkpoint import PROVENANCE_FILE, Checkpoint, read_json_object
from .files.hub import DraftSource
from .files.provenance import package_version
from .files.safetensors_file import SafetensorsFile
from .files.side_files import (
    SPARE_BYTES,
    check_no_other_weights,
    copy_side_files,
    write_config_and_index,
)
from .files.staging import check_output, staged_output, write_text
from .stored.decode import Floats
from .verify.dequantized import (
    QUANTIZED_ONLY,
    WORKERS,
    DequantizedLinear,
    DequantizedReport,
    FloatDtype,
    check_unchanged,
    row_blocks,
    verify_dequantized,
)

PROVENANCE_VERSION = 1
_TORCH: dict[FloatDtype, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeReport:
    """What was written, and what rounding lost.

    Attributes:
        scheme: what the source declares.
        kept: tensors copied byte for byte.
        linears: those dequantized.
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
        """Dequantized weights."""
        return sum(linear.elements for linear in self.linears)

    @property
    def rounded(self) -> int:
        """Dequantized weights that differ from the float32 product code * scale."""
        return sum(linear.rounded for linear in self.linears)

    @property
    def max_relative_difference(self) -> float:
        """Largest one of all linears."""
        return max(linear.max_relative_difference for linear in self.linears)


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
    code * scale rounded to nearest even; its scales, zero points and input scales disappear. All
    other tensors and side files keep their bytes, config.json loses its `quantization_config`.

    Args:
        source: the quantized folder.
        out: folder to create.
        dtype: of the dequantized weights; None for that of the floating-point weights kept.
        argv: the command line, for provenance.
        on_progress: called with the bytes of each tensor written.
        on_stage: called with "write" and "verify" when they begin.

    Raises:
        DraftQuantError: of the stage that failed; nothing is left behind.
    """
    checkpoint = Checkpoint.open(source.folder)
    plan = plan_dequantization(checkpoint, dtype)
    side_files = [file for file in checkpoint.side_files() if file not in QUANTIZED_ONLY]
    check_no_other_weights(
        checkpoint.folder,
        side_files,
        travel="beside the dequantized ones",
        made="dequantized",
    )
    made_by = _provenance_of(checkpoint.folder)
    side_bytes = sum((checkpoint.folder / file).stat().st_size for file in side_files)
    check_output(out, checkpoint.folder, needed_bytes=plan.bytes_after + side_bytes + SPARE_BYTES)
    with staged_output(out) as staging:
        on_stage("write")
        _write_tensors(plan, staging, on_progress)
        copy_side_files(checkpoint.folder, staging, side_files)
        _write_config(plan, staging)
        on_stage("verify")
        found = verify_dequantized(plan.source, staging, plan.dtype)
        if found.faults:
            faults = "\n  ".join(str(fault) for fault in found.faults[:10])
            raise VerifyError(
                out,
                f"the written folder does not pass verification, and is not published:\n  {faults}",
                fix="run again; if it stays, report this with the folder's config.json",
            )
        if made_by is not None:
            check_unchanged(made_by.get("tensor_sha256"), found.source_sha256, checkpoint.folder)
        report = DequantizeReport(
            out=out,
            scheme=str(plan.source.scheme),
            dtype=plan.dtype,
            kept=found.kept,
            linears=found.linears,
            bytes_before=checkpoint.nbytes,
            bytes_after=plan.bytes_after,
        )
        provenance = _provenance(plan, source, argv, report, found) | {"quantized_by": made_by}
        write_text(staging / PROVENANCE_FILE, json.dumps(provenance, indent=2) + "\n")
    return report


def _provenance_of(folder: Path) -> Mapping[str, Any] | None:
    """The draftquant.json of the quantized folder; None where something else made it."""
    path = folder / PROVENANCE_FILE
    return read_json_object(path, "copy or quantize the draft again") if path.exists() else None


def _write_tensors(plan: DequantizePlan, staging: Path, on_progress: Callable[[int], None]) -> None:
    """Two threads take tensors, the largest first; one core each."""
    checkpoint = plan.source.checkpoint
    with ExitStack() as stack:
        inputs, targets = {}, {}
        for file in plan.files:
            inputs[file] = os.open(checkpoint.folder / file, os.O_RDONLY)
            stack.callback(os.close, inputs[file])
            stored = [output.stored for output in plan.outputs if output.file == file]
            metadata = checkpoint.headers[file].metadata
            target = SafetensorsFile(staging / file, stored, metadata)
            targets[file] = stack.enter_context(target)

        def write(output: OutputTensor) -> int:
            if output.quantized:
                _dequantize(plan, output, targets[output.file])
            else:
                targets[output.file].copy(inputs[output.file], output.row.tensor)
            return output.stored.nbytes

        by_size = sorted(plan.outputs, key=lambda o: (-o.stored.nbytes, o.stored.name))
        pool = stack.enter_context(
            ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
        )
        for count in pool.map(write, by_size):
            on_progress(count)


def _dequantize(plan: DequantizePlan, output: OutputTensor, target: SafetensorsFile) -> None:
    """Stream one linear from codes and scales to plain weights."""
    linear = plan.source.linear(output.row)
    offset = 0
    for rows in row_blocks(output.row):
        product = linear.decoded(rows).dequantized()
        weights = _rounded(product, plan.dtype, output.stored.name, rows.start)
        offset += target.write(output.stored.name, weights, offset=offset)


def _rounded(product: Floats, dtype: FloatDtype, name: str, first_row: int) -> Tensor:
    """To nearest, ties to even; neither the product nor the result may overflow.

    Raises:
        CheckpointError: names the row.
    """
    magnitude = np.maximum(product.max(axis=1), -product.min(axis=1))  # NaN where one is
    bad = np.flatnonzero(~_fits(magnitude, dtype))
    if not len(bad):
        return torch.from_numpy(product).to(_TORCH[dtype])
    row = int(bad[0])
    if np.isfinite(magnitude[row]):
        raise CheckpointError(
            name,
            f"row {first_row + row} holds values that {dtype} cannot, up to {magnitude[row]:g}",
            fix="use --dtype float32",
        )
    raise CheckpointError(
        name,
        f"row {first_row + row} decodes to NaN or infinity: a code or scale is damaged",
        fix="run `draftquant verify`, then quantize the draft again",
    )


def _fits(magnitude: Floats, dtype: FloatDtype) -> npt.NDArray[np.bool_]:
    """Whether values round to finite ones; rounding is monotonic, so the largest of a row tells."""
    fits: npt.NDArray[np.bool_] = torch.from_numpy(magnitude).to(_TORCH[dtype]).isfinite().numpy()
    return fits


def _write_config(plan: DequantizePlan, staging: Path) -> None:
    """config.json without the declaration, and the index."""
    checkpoint = plan.source.checkpoint
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    files = {output.stored.name: output.file for output in plan.outputs}
    write_config_and_index(staging, checkpoint, config, files, plan.bytes_after)


def _provenance(
    plan: DequantizePlan,
    source: DraftSource,
    argv: Sequence[str],
    report: DequantizeReport,
    found: DequantizedReport,
) -> dict[str, Any]:
    """What this folder was made from; no time stamp, so that equal runs give equal files."""
    return {
        "format": "draftquant-dequantized",
        "version": PROVENANCE_VERSION,
        "draftquant": package_version("draftquant"),
        "argv": list(argv),
        "source": {
            "hub_id": source.hub_id,
            "revision": source.revision,
            "family": plan.source.draft.family.name,
            "scheme": report.scheme,
            "tensor_sha256": found.source_sha256,
        },
        "dtype": report.dtype,
        "rounding": {
            "elements": report.elements,
            "rounded": report.rounded,
            "max_relative_difference": report.max_relative_difference,
        },
        "tensor_sha256": found.output_sha256,
        "tensor_bytes": {"before": report.bytes_before, "after": report.bytes_after},
    }
