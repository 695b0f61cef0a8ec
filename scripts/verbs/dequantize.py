"""`dequantize`: the weights of a quantized draft as plain ones."""

import dataclasses
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from ...quantize.files.hub import Reference, resolve_draft, running_argv
from ...recipes.listener import Heard, verifying
from ...recipes.regular_file import AnyPath
from ..frame import reports
from ..frame.console import megabytes, print_table, stdout, table
from ..frame.verb import Command, verb

_DTYPES: dict[str, Literal["BF16", "F32"]] = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class DequantizeSettings(Heard):
    """Which folder, into which folder, in which dtype."""

    quantized: Reference
    out: AnyPath
    _: KW_ONLY
    dtype: Literal["bfloat16", "float32"] | None = None
    subtree: str | None = None


@verb(DequantizeSettings)
def dequantize(settings: DequantizeSettings) -> "reports.DequantizeReport":
    """Write the weights of a quantized draft as unquantized ones, which every engine loads.

    Returns:
        What was written, and how many weights were rounded.

    Raises:
        DraftQuantError: the folder is not quantized, or cannot be read; nothing is left behind.
    """
    from ...quantize.making.dequantize_draft import dequantize_draft, plan_dequantization

    source = resolve_draft(str(settings.quantized), settings.subtree)
    dtype = None if settings.dtype is None else _DTYPES[settings.dtype]
    plan = plan_dequantization(source.checkpoint(), dtype)
    if dropped := plan.source.cache_tensors:
        names = ", ".join(tensor.name for _, _, tensor in dropped[:2])
        settings.listener.note(
            f"{len(dropped)} scale(s) of the KV cache are dropped, because plain weights declare"
            f" none: {names}{', ...' if dropped[2:] else ''}"
        )
    with settings.listener.bar("dequantize", plan.bytes_after, "bytes") as bar:
        return dequantize_draft(
            source,
            Path(settings.out),
            dtype=dtype,
            argv=running_argv(),
            on_progress=bar.advance,
            on_stage=verifying(bar),
        )


def _show(report: "reports.DequantizeReport", _settings: object) -> None:
    rows = table(f"Dequantized: {report.scheme} to {report.dtype}", "linear",
                  "weights", "rounded", "largest relative difference")  # fmt: skip
    for linear in report.linears:
        largest = f"{linear.max_relative_difference:.6f}"
        rows.row(linear.module, f"{linear.elements:,}", f"{linear.rounded:,}", largest)
    print_table(rows)
    stdout().line(
        (str(report.out), "bold"),
        f": {len(report.linears)} linears dequantized, {report.rounded:,} of"
        f" {report.elements:,} weights rounded by up to {report.max_relative_difference:.6f},"
        f" {report.kept} tensors kept byte for byte,"
        f" {megabytes(report.bytes_before)} -> {megabytes(report.bytes_after)}, verified",
    )


def _mapping(report: "reports.DequantizeReport", _settings: object) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "elements": report.elements,
        "rounded": report.rounded,
        "max_relative_difference": report.max_relative_difference,
    }


COMMAND = Command(dequantize, _show, _mapping)
