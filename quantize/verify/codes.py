"""One tensor of the output against the source, in one pass over both, hashed on the way.

A kept tensor must have the same bytes; a quantized one must be the nearest rounding of the source
weight under its own stored scale. Both are read in blocks of rows, so memory stays bounded.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decode import E2M1, Bytes, Floats, e4m3_rounded, floats, read_rows, read_whole
from ..stored.linear import StoredLinear, spread
from ..stored.parts import INPUT_SCALES, ZERO_POINTS, scale_suffix
from .report import Fault, LinearFinding
from .scales import INT4_SMALLEST_SCALE, scale_faults

OnBytes = Callable[[int], None]
_KEPT_BLOCK = 2**21  # bytes
_BLOCK = 2**17  # weights: three float32 arrays of a block fit the cache of a core

INT4_MIN, INT4_MAX = -8.0, 7.0
# w/s is computed as w * fl(1/s), there and here: two roundings of 2^-24 each, |w/s| <= 8.5. Of two
# stages it is computed with three here, since s2 is s / s1: five in all, still less than 2^-18.
INT4_BOUND = 0.5 + 2.0**-18
# compressed-tensors 0.20 rounds w/s to the dtype of w: half an ulp of BF16 in [4, 8).
INT4_ROUNDED_QUOTIENT = 2.0**-6
FP8_MAX = 448.0
FP4_MAX = np.float32(6)
FP4_MIDPOINTS = (E2M1[:7] + E2M1[1:8]) / 2
# w/s is computed with one rounding of the scale's inverse and one of the product, there a division.
FP4_SLACK = np.float32(2.0**-21)
# One rounding of w/s to bfloat16 before the one to FP8 is tolerated: half an ulp of 8 bits.
FP8_SLACK = 2.0**-8


@dataclass(slots=True, kw_only=True)
class Compared:
    """What one comparison found; hashes by tensor name.

    Attributes:
        absmax: largest magnitude of the source weight; None unless its scales are good.
    """

    faults: list[Fault] = field(default_factory=list)
    source_sha256: dict[str, str] = field(default_factory=dict)
    output_sha256: dict[str, str] = field(default_factory=dict)
    linear: LinearFinding | None = None
    absmax: float | None = None


def compare_kept(
    source: Checkpoint, output: Checkpoint, tensor: TensorInfo, on_bytes: OnBytes
) -> Compared:
    """Byte equality of a tensor of `source` and the one of the same name and shape in `output`."""
    stored = output.tensors[tensor.name]
    rows = tensor.shape[0] if tensor.shape else 1
    per_block = max(1, _KEPT_BLOCK // max(1, tensor.nbytes // max(1, rows)))
    digest = hashlib.sha256()
    other = digest  # one hash serves both tensors up to the first difference
    changed, first_change = 0, -1
    for block in _row_blocks(rows, per_block):
        a = read_rows(source, tensor, block.start, block.stop)
        b = read_rows(output, stored, block.start, block.stop)
        if not np.array_equal(a, b):
            different = np.flatnonzero(a != b)
            if not changed:
                other = digest.copy()
                first_change = block.start * (tensor.nbytes // rows) + int(different[0])
            changed += len(different)
        digest.update(a.data)
        if changed:
            other.update(b.data)
        on_bytes(2 * a.size)
    found = Compared(
        source_sha256={tensor.name: digest.hexdigest()},
        output_sha256={tensor.name: other.hexdigest()},
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        found.faults.append(Fault(where=tensor.name, expected="the source's bytes", got=what))
    return found


def compare_linear(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    scheme: DeclaredScheme,
    *,
    absmax_scale: bool,
    rounded_quotient: bool = False,
    on_bytes: OnBytes,
) -> Compared:
    """A quantized linear, its parts already checked by header, against its source weight.

    Args:
        source: the unquantized draft.
        output: the quantized folder.
        tensor: the source weight, [out_features, in_features].
        scheme: what `output` declares.
        absmax_scale: the scale must also be absmax / 7.5 (INT4) or absmax / 448 (FP8).
        rounded_quotient: weight/scale may have been rounded to BF16 before it was rounded to INT4,
            or to FP8 in a first stage.
        on_bytes: called with the number of bytes read.
    """
    module = tensor.name.removesuffix(".weight")
    found = Compared()
    linear = StoredLinear(output, scheme, module, in_features=tensor.shape[1])
    scale = linear.scale
    one_stage = scheme.weight_dtype == "int4" and scheme.first_stage is None
    smallest = INT4_SMALLEST_SCALE if one_stage else 0.0
    good = np.isfinite(scale) & (scale > 0) & (scale >= smallest)
    if not good.all():
        row, group = map(int, np.argwhere(~good)[0])
        expected = f"finite scales > 0{f' and >= {smallest}' if smallest else ''}"
        got = f"{int((~good).sum())} other(s), first {scale[row, group]} at row {row}"
        where = f"{module}.{scale_suffix(scheme)}"
        found.faults.append(Fault(where=where, expected=expected, got=got))
    errors = _Errors(scheme, linear, tensor.shape, rounded_quotient)
    stored = linear.codes_tensor
    digests = hashlib.sha256(), hashlib.sha256()
    for rows in _row_blocks(tensor.shape[0], max(1, _BLOCK // max(1, tensor.shape[1]))):
        a = read_rows(source, tensor, rows.start, rows.stop)
        b = linear.bytes_of(rows)
        digests[0].update(a.data)
        if not scheme.transposed or rows.start == 0:
            digests[1].update(b.data)
            on_bytes(b.size)
        errors.add(rows, a, tensor.dtype, b)
        on_bytes(a.size)
    found.source_sha256[tensor.name] = digests[0].hexdigest()
    found.output_sha256[stored.name] = digests[1].hexdigest()
    if good.all():  # otherwise every element would be reported once more
        found.faults += errors.faults(stored.name)
        if absmax_scale:
            found.faults += scale_faults(output, scheme, module, scale, errors.absmax)
        found.linear = errors.finding(module)
        found.absmax = float(errors.absmax.max())
    return found


def hash_tensor(checkpoint: Checkpoint, tensor: TensorInfo) -> str:
    """The sha256 of a tensor's bytes, read block by block."""
    digest = hashlib.sha256()
    rows = tensor.shape[0] if tensor.shape else 1
    per_block = max(1, _KEPT_BLOCK // max(1, tensor.nbytes // max(1, rows)))
    for block in _row_blocks(rows, per_block):
        digest.update(read_rows(checkpoint, tensor, block.start, block.stop).data)
    return digest.hexdigest()


def _row_blocks(rows: int, per_block: int) -> Iterator[range]:
    for first in range(0, rows, per_block):
        yield range(first, min(first + per_block, rows))


class _Errors:
    """The errors of one linear, gathered over blocks of rows.

    Buffers are kept from block to block: fresh ones cost more in page faults than the arithmetic.
    """

    def __init__(
        self,
        scheme: DeclaredScheme,
        linear: StoredLinear,
        shape: tuple[int, ...],
        rounded_quotient: bool,
    ) -> None:
        self._scheme = scheme
        self._rounded_quotient = rounded_quotient
        one_stage = rounded_quotient and scheme.first_stage is None
        self._int4_bound = INT4_BOUND + (INT4_ROUNDED_QUOTIENT if one_stage else 0)
        self._linear = linear
        self._in_features = shape[1]
        self._group = scheme.group_size or shape[1]
        self.absmax = np.zeros((shape[0], -(-shape[1] // self._group)), np.float32)
        self._buffers: dict[str, Floats] = {}
        self._max_error = 0.0
        self._violations = 0
        self._worst = (0, 0, 0.0, 0.0)  # row, column, w/scale, code
        self._square_error = 0.0
        self._square = 0.0

    def add(self, rows: range, source: Bytes, dtype: str, stored: Bytes) -> None:
        """One block of rows, as the bytes on both sides."""
        shape = (len(rows), self._in_features)
        w = floats(source, dtype, out=self._buffer("w", shape))
        codes = self._linear.codes(rows, stored, out=self._buffer("codes", shape))
        own = self._linear.scale_of(rows)
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            self.absmax[rows.start : rows.stop] = group_absmax(w, self._group)
            scale = spread(own, self._scheme.group_size, self._in_features)
            first = self._linear.first_scale
            second = None if first is None else self._second_quotient(w, first, scale, codes)
            x = np.multiply(w, np.float32(1) / scale, out=w)
            error = np.subtract(x, codes, out=self._buffer("error", shape))
            self._square_error += _weighted_squares(error, scale)
            self._square += _weighted_squares(x, scale)
            if self._scheme.weight_dtype == "int4":
                self._int4_errors(x if second is None else second, codes, error)
            elif self._scheme.weight_dtype == "fp8_e4m3":
                self._fp8_errors(x, codes, error)
            else:
                self._fp4_errors(x, codes, error)
            self._judge(rows.start, error, x, codes)

    def _second_quotient(
        self, w: Floats, first: np.float32, scale: Floats, codes: Floats
    ) -> Floats:
        """FP8 value / second scale, where that of both stages is `scale`; the nearest to the codes.

        One rounding of w / first scale to BF16 may decide between two neighbouring values.
        """
        slack = FP8_SLACK if self._rounded_quotient else 0.0
        ends = [
            e4m3_rounded(w / first * np.float32(1 + s)) * (first / scale) for s in (-slack, slack)
        ]
        return np.clip(codes, np.minimum(*ends), np.maximum(*ends))

    def _int4_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -8, 7) - code| / bound, where x = w / scale."""
        np.clip(x, INT4_MIN, INT4_MAX, out=out)
        np.subtract(out, codes, out=out)
        np.abs(out, out=out)
        np.multiply(out, np.float32(1 / self._int4_bound), out=out)

    def _fp8_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -448, 448) - code| / bound.

        Half a step of F8_E4M3 between powers of two 2^e and 2^(e+1) is 2^(e-4), at least 2^-10. It
        is taken at the smaller of |x| and |code|, so a code one step across a power of two is seen.
        """
        clamped = np.clip(x, -FP8_MAX, FP8_MAX, out=out)
        half_step, size = self._buffer("half", out.shape), self._buffer("size", out.shape)
        np.abs(clamped, out=size)
        np.minimum(size, np.abs(codes, out=half_step), out=half_step)
        bits = half_step.view(np.uint32)
        np.bitwise_and(bits, np.uint32(0x7F800000), out=bits)  # 2^e: the mantissa cleared
        np.multiply(half_step, np.float32(2.0**-4), out=half_step)
        np.maximum(half_step, np.float32(2.0**-10), out=half_step)
        np.multiply(size, np.float32(FP8_SLACK), out=size)
        np.add(half_step, size, out=half_step)
        np.subtract(clamped, codes, out=out)
        np.abs(out, out=out)
        np.divide(out, half_step, out=out)

    def _fp4_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -6, 6) - code| against the distance of the nearest of the 16 values."""
        size = np.minimum(np.abs(x), FP4_MAX)
        nearest = E2M1[np.searchsorted(FP4_MIDPOINTS, size)]
        bound = np.abs(size - nearest) + FP4_SLACK * size + np.float32(2.0**-30)
        np.subtract(np.clip(x, -FP4_MAX, FP4_MAX), codes, out=out)
        np.divide(np.abs(out), bound, out=out)

    def _judge(self, first_row: int, error: Floats, x: Floats, codes: Floats) -> None:
        largest = float(error.max())  # NaN if any is
        if not largest <= self._max_error:
            row, column = divmod(int(error.argmax()), self._in_features)
            self._max_error = largest
            self._worst = (
                first_row + row,
                column,
                float(x[row, column]),
                float(codes[row, column]),
            )
        if not largest <= 1:
            self._violations += int(np.count_nonzero(~(error <= 1)))

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Floats:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = np.empty(shape, np.float32)
        return buffer[: shape[0]]

    def faults(self, name: str) -> list[Fault]:
        """Elements that nearest rounding does not give."""
        if not self._violations:
            return []
        row, column, x, code = self._worst
        got = (
            f"{self._violations} other(s), worst at row {row}, column {column}:"
            f" code {code:g} where weight/scale is {x:.6g}"
        )
        return [Fault(where=name, expected="codes nearest to weight/scale", got=got)]

    def finding(self, module: str) -> LinearFinding:
        """The figures of the report."""
        relative = (self._square_error / self._square) ** 0.5 if self._square else 0.0
        return LinearFinding(
            module=module, max_error=self._max_error, relative_l2_error=float(relative)
        )


def group_absmax(w: Floats, group: int) -> Floats:
    """Largest magnitude of every `group` inputs of a row; the last group may be shorter."""
    rows, columns = w.shape
    if columns % group:
        starts = np.arange(0, columns, group)
        largest: Floats = np.maximum.reduceat(np.abs(w), starts, axis=1)
        return largest
    parts = w.reshape(rows, -1, group)
    absmax: Floats = np.maximum(parts.max(axis=2), -parts.min(axis=2))
    return absmax


def _weighted_squares(x: Floats, scale: Floats) -> float:
    """Sum of (x * scale)^2; `scale` is [rows, 1], [1, 1] or one per element."""
    if scale.shape[1] == 1:
        return float((np.einsum("ij,ij->i", x, x) * scale[:, 0].astype(np.float64) ** 2).sum())
    wide = x * scale
    return float(np.einsum("ij,ij->", wide, wide, dtype=np.float64))


def companion_faults(
    output: Checkpoint, tensor: TensorInfo, values: Mapping[str, TensorInfo]
) -> list[Fault]:
    """Zero points, stored shape and input scale of a linear; `values` by suffix."""
    faults = []
    for suffix in ("weight_zero_point", "weight_zero_point_2"):
        if suffix in values and read_whole(output, values[suffix]).any():
            where, got = values[suffix].name, "a non-zero zero point"
            faults.append(Fault(where=where, expected="all zero (symmetric)", got=got))
    if "qzeros" in values and (read_whole(output, values["qzeros"]) != ZERO_POINTS["qzeros"]).any():
        faults.append(Fault(where=values["qzeros"].name, expected="8 in every nibble (symmetric)",
                            got="another zero point"))  # fmt: skip
    if "weight_shape" in values:
        shape = read_whole(output, values["weight_shape"]).view(np.int64).tolist()
        if shape != list(tensor.shape):
            faults.append(Fault(where=values["weight_shape"].name, expected=str(list(tensor.shape)),
                                got=str(shape)))  # fmt: skip
    for suffix in INPUT_SCALES:
        if suffix in values:
            scale = stored_scalar(output, values[suffix])
            if not 0 < scale < float("inf"):
                where, expected = values[suffix].name, "a finite scale > 0"
                faults.append(Fault(where=where, expected=expected, got=str(scale)))
    return faults


def stored_scalar(output: Checkpoint, tensor: TensorInfo) -> float:
    """The value of a tensor of one number."""
    return float(floats(read_whole(output, tensor), tensor.dtype)[0])
