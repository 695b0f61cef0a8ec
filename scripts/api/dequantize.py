"""`dequantize`: the weights of a quantized draft as plain ones."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...quantize.files.command_line import running_argv
from ...quantize.files.hub import resolve_draft
from . import reports
from .arguments import OutFolder, Quantized, Subtree
from .listener import verifying
from .option import Option
from .settings import Settings
from .verb import verb

_DTYPES: dict[str, Literal["BF16", "F32"]] = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class DequantizeSettings(Settings):
    """Of what, into which folder, in which dtype."""

    quantized: Quantized
    out: OutFolder
    _: KW_ONLY
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        Option("dtype of the dequantized weights (default: that of the unquantized "
        "tensors); float32 is exact"),
    ] = None  # fmt: skip
    subtree: Subtree = None


@verb(DequantizeSettings)
def dequantize(settings: DequantizeSettings) -> "reports.DequantizeReport":
    """Write the weights of a quantized draft as unquantized ones, which every engine loads.

    Returns:
        What was written, and how many weights were rounded.

    Raises:
        DraftQuantError: the folder is not quantized, or cannot be read; nothing is left behind.
    """
    from ...quantize.dequantize_draft import dequantize_draft, plan_dequantization

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
