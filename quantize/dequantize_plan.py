"""What a quantized folder becomes when it is dequantized. Pure: it reads no tensor data."""

import typing
from dataclasses import dataclass

from .drafts import Row
from .errors import CheckpointError
from .files.checkpoint import CONFIG_FILE, Checkpoint
from .files.safetensors_header import StoredTensor
from .stored.declarations import raw_declaration
from .stored.draft import StoredDraft
from .verify.dequantized import FloatDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the output.

    Attributes:
        row: the weight that it is.
        stored: name, dtype and shape in the output.
        file: safetensors file, the same as that of the source's codes.
        quantized: it is decoded from codes; otherwise it is copied.
    """

    row: Row
    stored: StoredTensor
    file: str
    quantized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizePlan:
    """Every tensor of the output, by name, and the dtype of the dequantized ones."""

    source: StoredDraft
    dtype: FloatDtype
    outputs: tuple[OutputTensor, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The safetensors files of the output; a shard of scales alone has none."""
        return tuple(sorted({output.file for output in self.outputs}))

    @property
    def bytes_after(self) -> int:
        """Tensor bytes of the output, headers not counted."""
        return sum(output.stored.nbytes for output in self.outputs)


def plan_dequantization(checkpoint: Checkpoint, dtype: FloatDtype | None = None) -> DequantizePlan:
    """What a quantized folder becomes. Reads headers only.

    Args:
        checkpoint: the quantized folder.
        dtype: of the dequantized weights; None for that of the floating-point weights kept.

    Raises:
        CheckpointError: the folder is not quantized, not a draft, or not as it declares, or its
            kept weights mix dtypes and none is given.
        VerifyError: its quantization_config is not understood.
    """
    if raw_declaration(checkpoint) is None:
        raise CheckpointError(
            checkpoint.folder / CONFIG_FILE,
            "declares no quantization_config: nothing to dequantize",
            fix="give the output folder of `draftquant quantize`, or another quantized draft",
        )
    source = StoredDraft.read(checkpoint)
    if not source.modules:
        raise CheckpointError(
            checkpoint.folder / CONFIG_FILE,
            f"declares {source.scheme}, but no linear is stored quantized: nothing to dequantize",
            fix="remove quantization_config from config.json, or quantize the draft again",
        )
    chosen = _kept_dtype(source) if dtype is None else dtype
    outputs = []
    for row in source.draft.rows:
        tensor, quantized = row.tensor, source.is_quantized(row)
        stored = StoredTensor(
            name=tensor.name, dtype=chosen if quantized else tensor.dtype, shape=tensor.shape
        )
        outputs.append(OutputTensor(row=row, stored=stored, file=tensor.file, quantized=quantized))
    return DequantizePlan(source=source, dtype=chosen, outputs=tuple(outputs))


def _kept_dtype(source: StoredDraft) -> FloatDtype:
    """The one dtype of the floating-point tensors that are not quantized."""
    kept = {row.tensor.dtype for row in source.draft.rows if not source.is_quantized(row)}
    floats: list[FloatDtype] = [d for d in typing.get_args(FloatDtype) if d in kept]
    if len(floats) != 1:
        raise CheckpointError(
            source.checkpoint.folder,
            f"expected kept weights of one dtype, got {' and '.join(floats) or 'none'}",
            fix="choose the dtype of the dequantized ones: --dtype bfloat16 or --dtype float32",
        )
    return floats[0]
