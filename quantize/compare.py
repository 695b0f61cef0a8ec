"""One tensor of the output against the source, in one pass over both, hashed on the way.

A kept tensor must have the same bytes; a quantized one must be the nearest rounding of the source
weight under its own stored scale. Both are read in blocks of rows, so memory stays bounded.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from .checkpoint import Checkpoint
from .declared import DeclaredScheme
from .decode import Bytes, Floats, decode_codes, floats, read_rows, read_scale, read_whole
from .safetensors_header import TensorInfo
from .stored import weight_name
from .verify_report import Fault, LinearFinding

OnBytes = Callable[[int], None]
_KEPT_BLOCK = 2**21  # bytes
_BLOCK = 2**17  # weights: three float32 arrays of a block fit the cache of a core

INT4_MIN, INT4_MAX = -8.0, 7.0
INT4_HALF_RANGE = 7.5  # scale = absmax / 7.5
INT4_SMALLEST_SCALE = 2.0**-23
# w/s is computed as w * fl(1/s), there and here: two roundings of 2^-24 each, |w/s| <= 8.5.
INT4_BOUND = 0.5 + 2.0**-18
FP8_MAX = 448.0
# One rounding of w/s to bfloat16 before the one to FP8 is tolerated: half an ulp of 8 bits.
FP8_SLACK = 2.0**-8
# scale = absmax / divisor, rounded to the scale's dtype: half an ulp, and one float32 division.
_SCALE_SLACK = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-8}
_F16_SMALLEST_STEP = 2.0**-24


@dataclass(slots=True, kw_only=True)
class Compared:
    """What one comparison found; hashes by tensor name."""

    faults: list[Fault] = field(default_factory=list)
    source_sha256: dict[str, str] = field(default_factory=dict)
    output_sha256: dict[str, str] = field(default_factory=dict)
    linear: LinearFinding | None = None


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
    on_bytes: OnBytes,
) -> Compared:
    """A quantized linear, its parts already checked by header, against its source weight.

    Args:
        source: the unquantized draft.
        output: the quantized folder.
        tensor: the source weight, [out_features, in_features].
        scheme: what `output` declares.
        absmax_scale: the scale must also be absmax / 7.5 (INT4) or absmax / 448 (FP8).
        on_bytes: called with the number of bytes read.
    """
    module = tensor.name.removesuffix(".weight")
    found = Compared()
    scale = read_scale(output, module)
    smallest = INT4_SMALLEST_SCALE if scheme.weight_dtype == "int4" else 0.0
    good = np.isfinite(scale) & (scale > 0) & (scale >= smallest)
    if not good.all():
        row = int(np.flatnonzero(~good[:, 0])[0])
        expected = f"finite scales > 0{f' and >= {smallest}' if smallest else ''}"
        got = f"{int((~good).sum())} other(s), first {scale[row, 0]} at row {row}"
        found.faults.append(Fault(where=f"{module}.weight_scale", expected=expected, got=got))
    errors = _Errors(scheme, scale, tensor.shape)
    stored = output.tensors[weight_name(scheme, module)]
    digests = hashlib.sha256(), hashlib.sha256()
    for rows in _row_blocks(tensor.shape[0], max(1, _BLOCK // max(1, tensor.shape[1]))):
        a = read_rows(source, tensor, rows.start, rows.stop)
        b = read_rows(output, stored, rows.start, rows.stop)
        digests[0].update(a.data)
        digests[1].update(b.data)
        errors.add(rows, a, tensor.dtype, b)
        on_bytes(a.size + b.size)
    found.source_sha256[tensor.name] = digests[0].hexdigest()
    found.output_sha256[stored.name] = digests[1].hexdigest()
    if good.all():  # otherwise every element would be reported once more
        found.faults += errors.faults(stored.name)
        if absmax_scale:
            found.faults += errors.scale_faults(module, output)
        found.linear = errors.finding(module)
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

    def __init__(self, scheme: DeclaredScheme, scale: Floats, shape: tuple[int, ...]) -> None:
        self._scheme = scheme
        self._scale = scale
        with np.errstate(all="ignore"):
            self._inv_scale = np.float32(1) / scale
        self._absmax = np.zeros(shape[0], np.float32)  # of each source row
        self._buffers: dict[str, Floats] = {}
        self._in_features = shape[1]
        self._max_error = 0.0
        self._violations = 0
        self._worst = (0, 0, 0.0, 0.0)  # row, column, w/scale, code
        self._square_error = 0.0
        self._square = 0.0

    def add(self, rows: range, source: Bytes, dtype: str, stored: Bytes) -> None:
        """One block of rows, as the bytes on both sides."""
        shape = (len(rows), self._in_features)
        per_row = self._scheme.granularity == "channel"
        channel = slice(rows.start, rows.stop) if per_row else slice(None)
        w = floats(source, dtype, out=self._buffer("w", shape))
        codes = decode_codes(self._scheme, stored, *shape, out=self._buffer("codes", shape))
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            self._absmax[rows.start : rows.stop] = np.maximum(w.max(axis=1), -w.min(axis=1))
            x = np.multiply(w, self._inv_scale[channel], out=w)
            error = np.subtract(x, codes, out=self._buffer("error", shape))
            square_scale = self._scale[channel, 0].astype(np.float64) ** 2
            self._square_error += float((_row_squares(error) * square_scale).sum())
            self._square += float((_row_squares(x) * square_scale).sum())
            if self._scheme.weight_dtype == "int4":
                self._int4_errors(x, codes, error)
            else:
                self._fp8_errors(x, codes, error)
            self._judge(rows.start, error, x, codes)

    def _int4_errors(self, x: Floats, codes: Floats, out: Floats) -> None:
        """|clamp(x, -8, 7) - code| / bound, where x = w / scale."""
        np.clip(x, INT4_MIN, INT4_MAX, out=out)
        np.subtract(out, codes, out=out)
        np.abs(out, out=out)
        np.multiply(out, np.float32(1 / INT4_BOUND), out=out)

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

    def scale_faults(self, module: str, output: Checkpoint) -> list[Fault]:
        """Scales that are not absmax / divisor; an all-zero weight may have any FP8 scale."""
        int4 = self._scheme.weight_dtype == "int4"
        per_row = self._scheme.granularity == "channel"
        absmax = self._absmax.astype(np.float64) if per_row else self._absmax.max(keepdims=True)
        dtype = output.tensors[f"{module}.weight_scale"].dtype
        expected = absmax / (INT4_HALF_RANGE if int4 else FP8_MAX)
        if int4:
            expected = np.maximum(expected, INT4_SMALLEST_SCALE)
        slack = expected * _SCALE_SLACK[dtype] + (_F16_SMALLEST_STEP if dtype == "F16" else 0)
        scale = self._scale[:, 0].astype(np.float64)
        wrong = ~(np.abs(scale - expected) <= slack) & (int4 | (absmax > 0))
        if not wrong.any():
            return []
        row = int(np.flatnonzero(wrong)[0])
        got = f"{int(wrong.sum())} other(s), first {scale[row]:.6g} at row {row}"
        rule = f"absmax / {INT4_HALF_RANGE if int4 else FP8_MAX:g}"
        return [
            Fault(where=f"{module}.weight_scale", expected=f"{rule} ({expected[row]:.6g})", got=got)
        ]

    def finding(self, module: str) -> LinearFinding:
        """The figures of the report."""
        relative = (self._square_error / self._square) ** 0.5 if self._square else 0.0
        return LinearFinding(
            module=module, max_error=self._max_error, relative_l2_error=float(relative)
        )


def _row_squares(x: Floats) -> Floats:
    squares: Floats = np.einsum("ij,ij->i", x, x)
    return squares


def companion_faults(
    output: Checkpoint, tensor: TensorInfo, values: Mapping[str, TensorInfo]
) -> list[Fault]:
    """Zero points, stored shape and input scale of a linear; `values` by suffix."""
    faults = []
    if "weight_zero_point" in values and read_whole(output, values["weight_zero_point"]).any():
        faults.append(Fault(where=values["weight_zero_point"].name, expected="all zero (symmetric)",
                            got="a non-zero zero point"))  # fmt: skip
    if "weight_shape" in values:
        shape = read_whole(output, values["weight_shape"]).view(np.int64).tolist()
        if shape != list(tensor.shape):
            faults.append(Fault(where=values["weight_shape"].name, expected=str(list(tensor.shape)),
                                got=str(shape)))  # fmt: skip
    if "input_scale" in values:
        scale = input_scale(output, values["input_scale"])
        if not 0 < scale < float("inf"):
            faults.append(Fault(where=values["input_scale"].name, expected="a finite scale > 0",
                                got=str(scale)))  # fmt: skip
    return faults


def input_scale(output: Checkpoint, tensor: TensorInfo) -> float:
    """The value of a stored static activation scale."""
    return float(floats(read_whole(output, tensor), tensor.dtype)[0])
