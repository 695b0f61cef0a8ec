"""`StoredLinear`: one quantized linear of a folder, decoded as the folder declares it.

In numpy, a block of rows at a time, sharing no code with the writer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import (
    WORD_BITS,
    Bytes,
    Floats,
    blocks_of,
    decoded_codes,
    floats,
    read_integers,
    read_rows,
    read_whole,
    scale_values,
    unpack_int4_columns,
    unpacked,
)
from .layouts.scheme import NIBBLES_PER_WORD, DeclaredScheme

GROUPS_OF_INPUTS = "g_idx"
INVERSE_SCALE = "weight_global_scale"
GLOBAL_SCALES = ("weight_scale_2", INVERSE_SCALE)
_FIX = "quantize the draft again"
_DECODED = 2**18  # weights


class Columns:
    """Codes in words whose rows are inputs, one or several: read whole, decoded by output."""

    def __init__(self, checkpoint: Checkpoint, tensor: TensorInfo, scheme: DeclaredScheme) -> None:
        self._scheme = scheme
        self.stored = read_whole(checkpoint, tensor)
        self._words = self.stored.view(np.int32).reshape(tensor.shape)
        self._along_inputs = scheme.layout.codes_along_inputs
        per_word = 1 if self._along_inputs else NIBBLES_PER_WORD
        self.out_features = tensor.shape[1] * per_word

    def codes(self, rows: range) -> Floats:
        """[rows, inputs and padding] float32, counted from the middle of their range."""
        scheme = self._scheme
        if self._along_inputs:
            bits, words = scheme.number.bits, self._words.view(np.uint32)
            count = len(words) * WORD_BITS // bits
            numbers = unpacked(words[:, rows.start : rows.stop], bits, count)
            return _from_the_middle(numbers, bits)
        first, last = rows.start // NIBBLES_PER_WORD, -(-rows.stop // NIBBLES_PER_WORD)
        method, unsigned = str(scheme.pack_method), scheme.layout.unsigned
        columns = unpack_int4_columns(self._words[:, first:last], method, unsigned=unsigned)
        start = rows.start - first * NIBBLES_PER_WORD
        return columns[start : start + len(rows)]


def zero_points(
    checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, out_features: int
) -> Floats | None:
    """The zero of codes, relative to the middle of their range; None where it is the middle.

    [out_features, groups] float32. CheckpointError where symmetric values are declared, or tools
    read what is stored in two ways.
    """
    where = scheme.layout.zeros(scheme)
    if where is None:
        return None
    tensor = checkpoint.tensors[f"{module}.{where.suffix}"]
    words = read_whole(checkpoint, tensor).view(np.uint32).reshape(tensor.shape)
    by_output = np.ascontiguousarray(words if where.outputs_first else words.T)
    if scheme.pack_method == "reorder":
        points = unpack_int4_columns(by_output.T.view(np.int32), "reorder", unsigned=True)
    else:
        bits = scheme.number.bits
        numbers = unpacked(by_output, bits, out_features)
        # GPTQModel adds 1 to whole words, which may carry over; kernels add 1 to each number.
        count = int(np.count_nonzero(numbers == 2**bits - 1)) if where.plus else 0
        if count:
            what = f"{tensor.name}: {count} zero point(s) are stored as {2**bits - 1}"
            what += f", which in this format GPTQModel reads as 0, and kernels as {2**bits}"
            fix = 'save the draft with GPTQModel\'s format "gptq_v2"'
            raise CheckpointError(checkpoint.folder, what, fix=fix)
        points = _from_the_middle(numbers.T, bits) + np.float32(where.plus)
    points = points[:out_features]
    if not points.any():
        return None
    if not scheme.asymmetric and scheme.layout.declares_symmetry:
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: symmetric values are declared, whose zero point is"
            f" {2 ** (scheme.number.bits - 1)}, got others",
            fix="declare them as they are (sym: false, or checkpoint_format), or quantize again",
        )
    return points


def input_groups(
    checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, in_features: int
) -> npt.NDArray[np.int64] | None:
    """The group of each input, [in_features]; None where groups are neighbours, in order."""
    tensor = checkpoint.tensors.get(f"{module}.{GROUPS_OF_INPUTS}")
    if tensor is None or GROUPS_OF_INPUTS not in scheme.layout.companions:
        return None
    groups = read_integers(checkpoint, tensor)
    usual = np.arange(in_features) // (scheme.group_size or in_features)
    if np.array_equal(groups, usual):
        return None
    if not scheme.ordered:
        raise CheckpointError(
            checkpoint.folder,
            f"{tensor.name}: groups of neighbours are declared (desc_act: false), got others",
            fix="declare desc_act: true, which engines look at, or quantize again",
        )
    if groups.min() < 0 or groups.max() > usual[-1]:
        what = f"expected groups 0 to {usual[-1]}, got {groups.min()} to {groups.max()}"
        raise CheckpointError(checkpoint.folder, f"{tensor.name}: {what}", fix=_FIX)
    got, expected = np.bincount(groups, minlength=usual[-1] + 1), np.bincount(usual)
    if not np.array_equal(got, expected):
        group = (got != expected).argmax()
        what = f"expected {expected[group]} inputs in group {group}, got {got[group]}"
        raise CheckpointError(checkpoint.folder, f"{tensor.name}: {what}", fix=_FIX)
    return groups


def _from_the_middle(numbers: npt.NDArray[np.uint8], bits: int) -> Floats:
    """[columns, rows] -> [rows, columns] float32, two's complement's range."""
    counted = np.ascontiguousarray(numbers.T).astype(np.float32)
    return np.subtract(counted, np.float32(2 ** (bits - 1)), out=counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWeight:
    """A block of rows of a quantized linear: w ≈ codes * scale.

    Attributes:
        codes: [rows, in_features] float32: whole numbers, FP8 or FP4 values.
        scale: [rows, groups] float32, [1, 1] for one scale per tensor.
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


def decoded_blocks(tensor: TensorInfo) -> Iterator[range]:
    """Blocks of rows of a linear that bound the memory of decoding it."""
    rows, columns = tensor.shape
    return blocks_of(rows, max(8, _DECODED // max(1, columns) // 8 * 8))  # whole transposed words


class StoredLinear:
    """One quantized linear of a folder, decoded a block of rows at a time.

    Transposed codes are read whole, four bits per weight.

    Attributes:
        scale: [out_features, groups] or [1, 1] float32, including that of a first stage.
        first_scale: that of the first of two stages; None where there is one.
        zero: [out_features, groups] float32, the codes' zero; None where it is 0 everywhere.
        order: inputs by group, where groups are not neighbours; else None.
    """

    def __init__(
        self, checkpoint: Checkpoint, scheme: DeclaredScheme, module: str, *, in_features: int
    ) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._in_features = in_features
        self.codes_tensor = checkpoint.tensors[f"{module}.{scheme.layout.weight_suffix(scheme)}"]
        rows, self._columns = self.codes_tensor.shape[0], None
        if scheme.transposed:
            self._columns = Columns(checkpoint, self.codes_tensor, scheme)
            rows = self._columns.out_features
        self.out_features = rows
        self.scale = stored_scales(checkpoint, scheme, module)
        if scheme.granularity == "block":
            self.scale = np.repeat(self.scale, scheme.rows_of_scale, axis=0)[:rows]
        elif scheme.number.global_scale or scheme.first_stage:
            self.scale = self.scale * global_scale(checkpoint, module)
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
        """Decode rows from the result of `bytes_of`, [rows, in_features]; in `out` if it fits."""
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
        return decoded_codes(by_row, self._scheme, None if padded else out)[:, : self._in_features]

    def ends(self, bits: int, rows: range) -> tuple[Floats | float, Floats | float]:
        """The smallest and the largest code of each place, inputs in the order of groups."""
        half = float(2 ** (bits - 1))
        if self.zero is None:
            return -half, half - 1
        zero = spread(self.zero[rows.start : rows.stop], self._scheme.group_size, self._in_features)
        return -half - zero, half - 1 - zero

    def scale_of(self, rows: range) -> Floats:
        """[rows, groups], or [1, 1] for one scale per tensor."""
        whole = self._scheme.granularity == "tensor"
        return self.scale if whole else self.scale[rows.start : rows.stop]

    def decoded(self, rows: range | None = None) -> DecodedWeight:
        """Decode some rows, or all; where groups are not neighbours, each input has a scale."""
        rows = range(self.out_features) if rows is None else rows
        scale = self.scale_of(rows)
        return DecodedWeight(
            codes=self.codes(rows, self.bytes_of(rows)),
            scale=scale if self._group_of is None else scale[:, self._group_of],
            group_size=self._scheme.group_size if self._group_of is None else 1,
        )

    def _of_inputs(self, values: Floats) -> Floats:
        if self._group_of is not None:
            return values[:, self._group_of]
        return spread(values, self._scheme.group_size, self._in_features)


def stored_scales(checkpoint: Checkpoint, scheme: DeclaredScheme, module: str) -> Floats:
    """The scales of rows, groups or blocks as stored, [rows or row blocks, groups]."""
    tensor = checkpoint.tensors[f"{module}.{scheme.layout.scale_suffix(scheme)}"]
    values = scale_values(read_whole(checkpoint, tensor), tensor.dtype)
    shaped = values.reshape(tensor.shape[0] if tensor.shape else 1, -1)
    return np.ascontiguousarray(shaped.T) if scheme.transposed else shaped


def global_scale(checkpoint: Checkpoint, module: str) -> np.float32:
    """The scale over those of groups (NVFP4) or rows (two stages), which may be stored inverted."""
    tensor = matrix_scale(checkpoint, module)
    stored = floats(read_whole(checkpoint, tensor), tensor.dtype)[0]
    with np.errstate(divide="ignore"):
        return np.float32(1 / stored if tensor.name.endswith(INVERSE_SCALE) else stored)


def matrix_scale(checkpoint: Checkpoint, module: str) -> TensorInfo:
    """The one stored scale of a whole matrix: NVFP4's global one, or that of FP8 per tensor."""
    suffixes = (*GLOBAL_SCALES, "weight_scale")
    scales = (checkpoint.tensors.get(f"{module}.{suffix}") for suffix in suffixes)
    return next(tensor for tensor in scales if tensor is not None and tensor.numel == 1)
