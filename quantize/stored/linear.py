"""`StoredLinear`: one quantized linear of a folder, decoded as the folder declares it.

In numpy, a block of rows at a time, sharing no code with what wrote it.
"""

from dataclasses import dataclass

import numpy as np

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .columns import Columns, input_groups, zero_points
from .decoded_numbers import (
    Bytes,
    Floats,
    Nibbles,
    decoder,
    floats,
    read_rows,
    read_whole,
    scale_values,
)
from .layouts import DeclaredScheme
from .parts import scale_suffix, weight_suffix

INVERSE_SCALE = "weight_global_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWeight:
    """A block of rows of a quantized linear: w ≈ codes * scale.

    Attributes:
        codes: [rows, in_features] float32: INT4 in -8 .. 7, FP8 or FP4 values.
        scale: [rows, groups] float32, [1, 1] for one scale per tensor.
        group_size: inputs that share a scale; None where all do.
    """

    codes: Floats
    scale: Floats
    group_size: int | None

    def dequantized(self) -> Floats:
        """The product codes * scale, [rows, in_features] float32."""
        return self.codes * spread(self.scale, self.group_size, self.codes.shape[1])


def spread(scale: Floats, group_size: int | None, in_features: int) -> Floats:
    """Scales [rows, groups] -> one per input [rows, in_features]; [rows, 1] where all share one."""
    if group_size is None:
        return scale
    return np.repeat(scale, group_size, axis=1)[:, :in_features]


class StoredLinear:
    """One quantized linear of a folder, decoded a block of rows at a time.

    Transposed codes are read whole, four bits a weight, since a row lies in every part of them.

    Args:
        module: on-disk name, for example "midlayer.self_attn.q_proj".
        in_features: columns of the weight; the padding of the last packed word is dropped.

    Attributes:
        codes_tensor: the tensor with the codes.
        scale: [out_features, groups] or [1, 1] float32, that of a first stage included.
        first_scale: of a first stage of two; None where there is one.
        zero: [out_features, groups] float32, what codes count from; None where it is 0 everywhere.
        order: inputs by group, where groups are no neighbours; else None.

    Raises:
        CheckpointError: the stored groups of inputs or zero points are none.
    """

    def __init__(
        self, checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, *, in_features: int
    ) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._in_features = in_features
        self._nibbles = Nibbles(scheme.pack_method, scheme.layout.nibble_offset)
        self.codes_tensor = checkpoint.tensors[f"{module}.{weight_suffix(scheme)}"]
        rows, self._columns = self.codes_tensor.shape[0], None
        if scheme.transposed:
            self._columns = Columns(checkpoint, self.codes_tensor, scheme)
            rows = self._columns.out_features
        self.out_features = rows
        self.scale = _scale(checkpoint, scheme, module, rows)
        self.first_scale = global_scale(checkpoint, module) if scheme.first_stage else None
        self.zero = zero_points(checkpoint, scheme, module, rows)
        self._group_of = input_groups(checkpoint, scheme, module, in_features)
        self.order = None if self._group_of is None else np.argsort(self._group_of, kind="stable")

    def bytes_of(self, rows: range) -> Bytes:
        """The stored bytes of some rows; all bytes where codes are transposed."""
        if self._columns is not None:
            return self._columns.stored
        return read_rows(self._checkpoint, self.codes_tensor, rows.start, rows.stop)

    def codes(self, rows: range, stored: Bytes, *, out: Floats | None = None) -> Floats:
        """Decode rows from what `bytes_of` gave, [rows, in_features] float32.

        `out`, if given, is a contiguous array of that shape; it is used where it can be.
        """
        levels = self.levels(rows, stored, out=out)
        if self.zero is None:
            return levels
        counted: Floats = levels - self._of_inputs(self.zero[rows.start : rows.stop])
        return counted

    def levels(self, rows: range, stored: Bytes, *, out: Floats | None = None) -> Floats:
        """The same, counted from the middle of their range whatever the zero points are."""
        if self._columns is not None:
            return self._columns.codes(rows)[:, : self._in_features]
        by_row = stored.reshape(len(rows), -1)
        padded = by_row.shape[1] * 8 != self._in_features * self._scheme.number.bits
        decode = decoder(self._scheme.number)
        codes = decode(by_row, self._nibbles, None if padded else out)
        return codes[:, : self._in_features]

    def ends(self, bits: int, rows: range) -> tuple[Floats | float, Floats | float]:
        """The smallest and the largest code of each place, inputs in the order of groups."""
        half = float(2 ** (bits - 1))
        if self.zero is None:
            return -half, half - 1
        zero = spread(self.zero[rows.start : rows.stop], self._scheme.group_size, self._in_features)
        return -half - zero, half - 1 - zero

    def scale_of(self, rows: range) -> Floats:
        """[rows, groups], or [1, 1] for one scale per tensor."""
        return (
            self.scale
            if self._scheme.granularity == "tensor"
            else self.scale[rows.start : rows.stop]
        )

    def decoded(self, rows: range | None = None) -> DecodedWeight:
        """Decode some rows, or all; where groups are no neighbours, each input has a scale."""
        rows = range(self.out_features) if rows is None else rows
        scale = self.scale_of(rows)
        return DecodedWeight(
            codes=self.codes(rows, self.bytes_of(rows)),
            scale=scale if self._group_of is None else scale[:, self._group_of],
            group_size=self._scheme.group_size if self._group_of is None else 1,
        )

    def _of_inputs(self, values: Floats) -> Floats:
        """Values of groups -> of inputs; [rows, 1] where all share one."""
        if self._group_of is not None:
            return values[:, self._group_of]
        return spread(values, self._scheme.group_size, self._in_features)


def _scale(
    checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, out_features: int
) -> Floats:
    """All weight scales of a linear, [out_features, groups] or [1, 1] float32."""
    tensor = checkpoint.tensors[f"{module}.{scale_suffix(scheme)}"]
    scale = scale_values(read_whole(checkpoint, tensor), tensor.dtype)
    if scheme.granularity == "tensor":
        return scale.reshape(1, 1)
    if scheme.granularity == "block":
        blocks = scale.reshape(tensor.shape[0], -1)
        rows = np.repeat(blocks, scheme.rows_of_scale, axis=0)
        return rows[:out_features]
    if scheme.transposed:
        return np.ascontiguousarray(scale.reshape(tensor.shape).T)
    scale = scale.reshape(out_features, -1)
    if scheme.number.global_scale or scheme.first_stage:
        scale = scale * global_scale(checkpoint, module)
    return scale


def stored_scales(checkpoint: Checkpoint, scheme: DeclaredScheme, module: str) -> Floats:
    """The scales of rows, groups or blocks as they are stored, [rows or row blocks, groups]."""
    tensor = checkpoint.tensors[f"{module}.{scale_suffix(scheme)}"]
    values = scale_values(read_whole(checkpoint, tensor), tensor.dtype)
    shaped = values.reshape(tensor.shape[0], -1)
    return np.ascontiguousarray(shaped.T) if scheme.transposed else shaped


def global_scale(checkpoint: Checkpoint, module: str) -> np.float32:
    """The scale over those of groups (NVFP4) or of rows (two stages).

    compressed-tensors stores the inverse.
    """
    tensor = matrix_scale(checkpoint, module)
    stored = floats(read_whole(checkpoint, tensor), tensor.dtype)[0]
    with np.errstate(divide="ignore"):
        return np.float32(1 / stored if tensor.name.endswith(INVERSE_SCALE) else stored)


def matrix_scale(checkpoint: Checkpoint, module: str) -> TensorInfo:
    """The one stored scale of a whole matrix: NVFP4's global one, or that of FP8 per tensor."""
    suffixes = ("weight_scale_2", INVERSE_SCALE, "weight_scale")
    found = (checkpoint.tensors.get(f"{module}.{suffix}") for suffix in suffixes)
    return next(tensor for tensor in found if tensor is not None and tensor.numel == 1)
