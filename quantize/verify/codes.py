"""A quantized linear of the output against its source weight, in one pass over both.

Both are read in blocks of rows, so memory stays bounded, and hashed on the way. What codes and
scales must be is said by a rule: see `rules`.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...recipes.errors import CheckpointError
from ...recipes.formats import WeightDtype
from ..files.checkpoint import Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, problem_of
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import Bytes, Floats, floats, read_rows
from ..stored.layouts import DeclaredScheme
from ..stored.layouts.scheme import NIBBLES_PER_WORD
from ..stored.linear import StoredLinear, global_scale, spread, stored_scales
from ..stored.stored_declaration import scale_suffix
from .code_judges import Block, Buffers, CarriedNumbers, Judge, Near, Nearest, Numbers
from .foreign_rules import about_absmax_faults, foreign_judge, integer_scale_rule
from .scales import (
    INT4_SMALLEST_SCALE,
    Bits,
    Rule,
    group_absmax,
    magnitudes,
    scale_faults,
    values_of,
    whole_scale,
    whole_scale_faults,
)
from .verify_report import Compared, Fault, LinearFinding, NotFinite, OnBytes, blocks_of

_BLOCK = 2**17  # weights: a few float32 arrays of a block fit the cache of a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is to be known of a linear beside its own weight.

    Attributes:
        rule: what is demanded.
        exponent: k; the first half of the weight's columns was multiplied by 2^k.
        largest: magnitude that the one scale of the matrix must cover; None where it has none, or
            where the rule does not say what it must be.
        group: on-disk names of the linears that `largest` is of.
        carried: the number format of the codes, where a wider one carries them; else None.
        scale_dtype: to which INT4 scales were rounded; they may be stored in a wider one.
        from_inverse: the scale of the matrix was transcoded from its inverse.
    """

    rule: Rule
    exponent: int = 0
    largest: np.float32 | None = None
    group: tuple[str, ...] = ()
    carried: WeightDtype | None = None
    scale_dtype: str = "F32"
    from_inverse: bool = False


def compare_linear(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    scheme: DeclaredScheme,
    expected: Expected,
    *,
    on_bytes: OnBytes,
    algorithm: Algorithm = NEWEST,
) -> Compared:
    """A quantized linear, its parts already checked by header, against its source weight.

    Args:
        tensor: the source weight, [out_features, in_features].
        scheme: what `output` declares.
        on_bytes: called with the number of bytes read.
    """
    module, rule = tensor.name.removesuffix(".weight"), expected.rule
    found = Compared()
    try:
        linear = StoredLinear(output, scheme, module, in_features=_width(tensor, scheme, rule))
    except CheckpointError as exc:
        found.faults.append(Fault(where=module, expected="what is declared", got=exc.what))
        return found
    # What the codes are, whatever carries them.
    own = replace(scheme, weight_dtype=expected.carried) if expected.carried else scheme
    signed = own.has_signed_scales and not rule.of_our_own
    bad = _no_scales(np.abs(linear.scale) if signed else linear.scale, own)
    if bad is not None:
        where = f"{module}.{scale_suffix(scheme)}"
        found.faults.append(Fault(where=where, expected=bad[0], got=bad[1]))
    whole = None
    if expected.largest is not None:
        wrong = whole_scale_faults(
            output, scheme, module, expected.largest, expected.group,
            from_inverse=expected.from_inverse,
        )  # fmt: skip
        found.faults += wrong if bad is None else []
        # What is stored may be (or come from) its inverse, from which it does not follow exactly.
        whole = whole_scale(scheme, expected.largest)
        whole = global_scale(output, module) if wrong else whole
    buffers = Buffers()
    judge = _judge(output, own, module, linear, expected, whole, buffers)
    errors = _Pass(scheme, linear, tensor, expected, judge, buffers)
    digests = Digest(algorithm), Digest(algorithm)
    for rows in blocks_of(tensor.shape[0], _rows_of_block(tensor, scheme)):
        a = read_rows(source, tensor, rows.start, rows.stop)
        b = linear.bytes_of(rows)
        digests[0].update(a.data)
        if not scheme.transposed or rows.start == 0:
            digests[1].update(b.data)
            on_bytes(b.size)
        errors.add(rows, a, b)
        on_bytes(a.size)
    stored = linear.codes_tensor.name
    found.source_digests[tensor.name] = str(digests[0])
    found.output_digests[stored] = str(digests[1])
    if not errors.is_finite and (problem := problem_of(source, tensor)):
        found.faults = NotFinite.of(tensor.name, problem)  # no value can be held against them
    elif bad is None:  # otherwise every element would be reported once more
        found.faults += judge.faults(stored) + errors.padding_faults(stored)
        compensated = judge.max_error is None
        found.faults += _scale_faults(
            output, own, module, linear, errors.absmax, expected, whole, compensated=compensated
        )
        found.linear = errors.finding(module)
        if rule.scales == "about-absmax" and scheme.number.is_integer:
            name = f"{module}.{scale_suffix(scheme)}"
            scales = _scale_rule(output.tensors[name], scheme, linear, errors.absmax)
            codes = "compensating" if compensated else "nearest"
            found.linear = replace(found.linear, found=f"scales {scales}, {codes} codes")
        found.absmax = float(errors.absmax.max())
    return found


def _rows_of_block(tensor: TensorInfo, scheme: DeclaredScheme) -> int:
    """Of transposed codes whole words."""
    rows = max(1, _BLOCK // max(1, tensor.shape[1]))
    return -(-rows // NIBBLES_PER_WORD) * NIBBLES_PER_WORD if scheme.transposed else rows


def _width(tensor: TensorInfo, scheme: DeclaredScheme, rule: Rule) -> int:
    """Columns to decode: the padding of the last word of a row too, where it is known."""
    columns = tensor.shape[1]
    if rule.of_our_own and scheme.number.is_integer and not scheme.transposed:
        return -(-columns // NIBBLES_PER_WORD) * NIBBLES_PER_WORD
    return columns


def _no_scales(scale: Floats, scheme: DeclaredScheme) -> tuple[str, str] | None:
    """What scales must be to be any, and what is found; None where all are."""
    one_stage = scheme.number.is_integer and scheme.first_stage is None
    smallest = float(INT4_SMALLEST_SCALE) if one_stage else 0.0
    good = np.isfinite(scale) & (scale > 0) & (scale >= smallest)
    if good.all():
        return None
    row, group = map(int, np.argwhere(~good)[0])
    expected = f"finite scales > 0{f' and >= {smallest}' if smallest else ''}"
    return expected, f"{int((~good).sum())} other(s), first {scale[row, group]} at row {row}"


def _judge(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    linear: StoredLinear,
    expected: Expected,
    whole: np.float32 | None,
    buffers: Buffers,
) -> Judge:
    rule, carried = expected.rule, expected.carried is not None
    if rule.codes == "about-nearest":
        return foreign_judge(scheme, linear, buffers)
    scale, first = linear.scale, None
    if scheme.first_stage is not None:
        scale, first = stored_scales(output, scheme, module), whole
    elif whole is not None and scheme.number.global_scale and whole != global_scale(output, module):
        scale = stored_scales(output, scheme, module) * whole
    nearest = Nearest(scheme, scale, first, buffers, carried=carried)
    if rule.codes == "nearest":
        return nearest
    numbers = CarriedNumbers() if carried else Numbers()
    return Near(numbers, nearest, linear, scheme.group_size, buffers)


def _scale_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    linear: StoredLinear,
    largest: Floats,
    expected: Expected,
    whole: np.float32 | None,
    *,
    compensated: bool,
) -> list[Fault]:
    """Scales of rows, groups or blocks that the rule does not give."""
    rule = expected.rule
    if rule.scales == "positive" or scheme.granularity == "tensor":
        return []
    if rule.scales == "about-absmax":
        sides = output, scheme, module, linear.scale, largest
        return about_absmax_faults(*sides, compensated=compensated)
    dtype = expected.scale_dtype if scheme.number.is_integer and whole is None else None
    return scale_faults(output, scheme, module, largest, whole, rule.scales, dtype=dtype)


def _scale_rule(
    tensor: TensorInfo, scheme: DeclaredScheme, linear: StoredLinear, largest: Floats
) -> str:
    return (
        "of two stages"
        if scheme.first_stage
        else integer_scale_rule(tensor, scheme, linear.scale, largest)
    )


class _Pass:
    """One pass over the blocks of rows of a linear: largest magnitudes and the error.

    Where groups of inputs are no neighbours, all is in the order of groups.
    """

    def __init__(
        self,
        scheme: DeclaredScheme,
        linear: StoredLinear,
        tensor: TensorInfo,
        expected: Expected,
        judge: Judge,
        buffers: Buffers,
    ) -> None:
        rows, self._columns = tensor.shape
        self._width = _width(tensor, scheme, expected.rule)
        self._dtype = tensor.dtype
        self._linear, self._judge, self._buffers = linear, judge, buffers
        self._exponent = expected.exponent
        self._order = linear.order
        self._group_size = scheme.group_size
        # That of a whole matrix was looked for before, where it is demanded exactly.
        self._needs_absmax = expected.largest is None or scheme.granularity != "tensor"
        self._group = scheme.group_size or self._columns
        self._square_rows = scheme.rows_of_scale if scheme.granularity == "block" else 0
        self.absmax = np.zeros((rows, -(-self._columns // self._group)), np.float32)
        self._padding = 0
        self._square_error = 0.0
        self._square = 0.0

    def add(self, rows: range, source: Bytes, stored: Bytes) -> None:
        """One block of rows, as the bytes on both sides."""
        shape = len(rows), self._columns
        w = floats(source, self._dtype, out=self._buffers.get("w", shape))
        if self._order is not None:
            w = np.ascontiguousarray(w[:, self._order])
        if self._exponent:
            half = w[:, : self._columns // 2]
            np.multiply(half, np.float32(2.0**self._exponent), out=half)
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            if self._needs_absmax:
                bits: Bits = w.view(np.uint32)
                if not self._exponent and self._dtype != "F32" and self._order is None:
                    bits = source.view(np.uint16).reshape(shape)
                self.absmax[rows.start : rows.stop] = self._absmax_of(rows, bits)
            block = Block(rows.start, w, stored, partial(self._codes, rows, stored))
            self._judge.add(block)
            scale = spread(self._linear.scale_of(rows), self._group_size, self._columns)
            # The judge is done with the codes: one array less in the cache.
            lost = np.multiply(block.codes, scale, out=block.codes)
            np.subtract(w, lost, out=lost)
            self._square_error += _sum_of_squares(lost)
            self._square += _sum_of_squares(w)

    def _absmax_of(self, rows: range, bits: Bits) -> Floats:
        """Of groups of each row; of squares the largest of all their rows that are in the block."""
        dtype = self._dtype if bits.dtype == np.uint16 else "F32"
        if not self._square_rows:
            return values_of(group_absmax(bits, self._group), dtype)
        found = np.empty((len(rows), self.absmax.shape[1]), np.float32)
        first = 0
        while first < len(rows):
            stop = first + self._square_rows - (rows.start + first) % self._square_rows
            largest = magnitudes(bits[first:stop]).max(axis=0, keepdims=True)
            found[first:stop] = values_of(group_absmax(largest, self._group), dtype)
            first = stop
        return found

    def _codes(self, rows: range, stored: Bytes) -> Floats:
        """The codes without the padding of packed words, which is counted where it is not zero."""
        wide = self._buffers.get("codes", (len(rows), self._width))
        decoded = self._linear.codes(rows, stored, out=wide)
        if self._order is not None:
            return np.ascontiguousarray(decoded[:, self._order])
        if self._width == self._columns:
            return decoded
        self._padding += int(np.count_nonzero(decoded[:, self._columns :]))
        return np.ascontiguousarray(decoded[:, : self._columns])

    @property
    def is_finite(self) -> bool:
        """False where the weight holds NaN, infinity, or numbers whose squares are too large."""
        return math.isfinite(self._square)

    def padding_faults(self, name: str) -> list[Fault]:
        """Codes beyond the last column."""
        if not self._padding:
            return []
        got = f"{self._padding} other(s)"
        return [Fault(where=name, expected="padding of the last word of a row with 0", got=got)]

    def finding(self, module: str) -> LinearFinding:
        """The figures of the report."""
        relative = (self._square_error / self._square) ** 0.5 if self._square else 0.0
        return LinearFinding(
            module=module,
            wrong_codes=self._judge.wrong,
            max_error=self._judge.max_error,
            relative_l2_error=float(relative),
        )


def _sum_of_squares(x: Floats) -> float:
    """In float32 over some thousand elements, in float64 over these sums.

    BLAS would take more than one thread for longer ones.
    """
    flat, step = x.reshape(-1), 8192
    parts = (flat[first : first + step] for first in range(0, flat.size, step))
    return sum(float(np.dot(part, part)) for part in parts)
