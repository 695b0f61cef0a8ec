"""Compares a quantized linear of the output with its source weight, in one pass over both."""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from ...recipes.errors import CheckpointError
from ..files.checkpoint import Checkpoint
from ..files.digests import Digest
from ..files.finiteness import problem_of
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import Bytes, Floats, blocks_of, floats, read_rows
from ..stored.layouts.scheme import NIBBLES_PER_WORD, DeclaredScheme
from ..stored.linear import StoredLinear, global_scale, spread, stored_scales
from .code_judges import Block, Buffers, Judge, Near, Nearest
from .comparison import Compared, Fault, LinearFinding, NotFinite, Sides, others
from .foreign_rules import about_absmax_faults, foreign_judge, integer_scale_rule
from .scales import (
    INTEGER_SMALLEST_SCALE,
    Bits,
    Demand,
    group_absmax,
    magnitudes,
    scale_faults,
    values_of,
    whole_scale,
    whole_scale_faults,
)

_BLOCK = 2**17  # weights: a few float32 arrays of this size fit the cache of a core


def compare_linear(sides: Sides, tensor: TensorInfo, demand: Demand) -> Compared:
    """Compare a quantized linear, whose parts were checked by header, with its source weight."""
    module, scheme, width = tensor.name.removesuffix(".weight"), demand.scheme, tensor.shape[1]
    if scheme is None:
        return Compared()
    step = max(1, _BLOCK // max(1, width))
    if demand.rule.of_our_own and scheme.number.is_integer and not scheme.transposed:
        # The padding of the last word of a row is known, and decoded too.
        per_word = scheme.number.codes_per_element
        width = -(-width // per_word) * per_word
    try:
        linear = StoredLinear(sides.output, scheme, module, in_features=width)
    except CheckpointError as exc:
        return Compared(faults=[Fault(module, "what is declared", exc.what)])
    judged = _Linear(sides.output, tensor, demand, scheme, linear, width)
    digests = Digest(), Digest()
    step = -(-step // NIBBLES_PER_WORD) * NIBBLES_PER_WORD if scheme.transposed else step
    for rows in blocks_of(tensor.shape[0], step):
        a = read_rows(sides.source, tensor, rows.start, rows.stop)
        b = linear.bytes_of(rows)
        digests[0].update(a.data)
        if not scheme.transposed or rows.start == 0:
            digests[1].update(b.data)
            sides.on_bytes(b.size)
        judged.add(rows, a, b)
        sides.on_bytes(a.size)
    compared = judged.compared(sides.source)
    compared.source_digests[tensor.name] = str(digests[0])
    compared.output_digests[linear.codes_tensor.name] = str(digests[1])
    return compared


class _Linear:
    """One pass over the blocks of rows of a linear: its judge, largest magnitudes and the error.

    Where the inputs of a group are not neighbours, all arrays are in the order of groups.
    """

    def __init__(
        self,
        output: Checkpoint,
        tensor: TensorInfo,
        demand: Demand,
        scheme: DeclaredScheme,
        linear: StoredLinear,
        width: int,
    ) -> None:
        self._output, self._tensor, self._demand, self._linear = output, tensor, demand, linear
        self._module = tensor.name.removesuffix(".weight")
        self._declared = scheme
        self._scales = f"{self._module}.{scheme.layout.scale_suffix(scheme)}"
        # What the codes are, whichever format stores them.
        self._scheme = replace(scheme, weight_dtype=demand.carried or scheme.weight_dtype)
        self._buffers = Buffers()
        rows, self._columns = tensor.shape
        self._width = width
        # The largest magnitude of the whole matrix was found before, where it is demanded exactly.
        self._needs_absmax = demand.largest is None or scheme.granularity != "tensor"
        self._group = scheme.group_size or self._columns
        self._square_rows = scheme.rows_of_scale if scheme.granularity == "block" else 0
        self._absmax = np.zeros((rows, -(-self._columns // self._group)), np.float32)
        self._padding = 0
        self._square_error = self._square = 0.0
        self._faults, self._whole = self._no_scales(), None
        self._good_scales = not self._faults
        if demand.largest is not None:
            wrong = whole_scale_faults(output, scheme, self._module, demand)
            self._faults += wrong if self._good_scales else []
            # The file may store the inverse, or a scale made from it that does not give it exactly.
            self._whole = whole_scale(scheme, demand.largest)
            self._whole = global_scale(output, self._module) if wrong else self._whole
        self._judge = self._chosen_judge()

    def _no_scales(self) -> list[Fault]:
        """A fault for scales that are not numbers."""
        scheme, scale = self._scheme, self._linear.scale
        signed = scheme.has_signed_scales and not self._demand.rule.of_our_own
        scale = np.abs(scale) if signed else scale
        one_stage = scheme.number.is_integer and scheme.first_stage is None
        smallest = float(INTEGER_SMALLEST_SCALE) if one_stage else 0.0
        wrong = ~(np.isfinite(scale) & (scale > 0) & (scale >= smallest))
        expected = f"finite scales > 0{f' and >= {smallest}' if smallest else ''}"
        return others(self._scales, expected, wrong, lambda at: f"first {scale[at]} at row {at[0]}")

    def _chosen_judge(self) -> Judge:
        output, scheme, linear, whole = self._output, self._scheme, self._linear, self._whole
        rule, carried = self._demand.rule, self._demand.carried is not None
        if rule.codes == "about-nearest":
            return foreign_judge(scheme, linear, self._buffers)
        scale, first = linear.scale, None
        if scheme.first_stage is not None:
            scale, first = stored_scales(output, scheme, self._module), whole
        elif whole is not None and scheme.number.global_scale:
            other = whole != global_scale(output, self._module)
            scale = stored_scales(output, scheme, self._module) * whole if other else scale
        nearest = Nearest(scheme, scale, first, self._buffers, carried=carried)
        if rule.codes == "nearest":
            return nearest
        return Near(nearest, linear, scheme.group_size, self._buffers, carried=carried)

    def add(self, rows: range, source: Bytes, stored: Bytes) -> None:
        shape = len(rows), self._columns
        dtype, order, exponent = self._tensor.dtype, self._linear.order, self._demand.exponent
        w = floats(source, dtype, out=self._buffers.get("w", shape))
        if order is not None:
            w = np.ascontiguousarray(w[:, order])
        if exponent:
            half = w[:, : self._columns // 2]
            np.multiply(half, np.float32(2.0**exponent), out=half)
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            if self._needs_absmax:
                bits: Bits = w.view(np.uint32)
                if not exponent and dtype != "F32" and order is None:
                    bits = source.view(np.uint16).reshape(shape)
                self._absmax[rows.start : rows.stop] = self._absmax_of(rows, bits)
            block = Block(rows.start, w, stored, partial(self._codes, rows, stored))
            self._judge.add(block)
            scale = spread(self._linear.scale_of(rows), self._declared.group_size, self._columns)
            # The judge has finished with the codes: reuse one array of the cache.
            lost = np.multiply(block.codes, scale, out=block.codes)
            np.subtract(w, lost, out=lost)
            self._square_error += _sum_of_squares(lost)
            self._square += _sum_of_squares(w)

    def _absmax_of(self, rows: range, bits: Bits) -> Floats:
        """Largest magnitudes by group of each row; by square, over its rows in the block."""
        dtype = self._tensor.dtype if bits.dtype == np.uint16 else "F32"
        if not self._square_rows:
            return values_of(group_absmax(bits, self._group), dtype)
        square = np.arange(rows.start, rows.stop) // self._square_rows
        first = np.flatnonzero(np.diff(square, prepend=-1))
        largest: Bits = np.maximum.reduceat(magnitudes(bits), first, axis=0)
        absmax: Floats = values_of(group_absmax(largest, self._group), dtype)[square - square[0]]
        return absmax

    def _codes(self, rows: range, stored: Bytes) -> Floats:
        """The codes without the padding of packed words; padding that is not zero is counted."""
        wide = self._buffers.get("codes", (len(rows), self._width))
        decoded = self._linear.codes(rows, stored, out=wide)
        if self._linear.order is not None:
            return np.ascontiguousarray(decoded[:, self._linear.order])
        if self._width == self._columns:
            return decoded
        self._padding += int(np.count_nonzero(decoded[:, self._columns :]))
        return np.ascontiguousarray(decoded[:, : self._columns])

    def compared(self, source: Checkpoint) -> Compared:
        tensor, result = self._tensor, Compared(faults=self._faults)
        # Finds NaN, infinity, and numbers whose squares overflow.
        odd = not math.isfinite(self._square)
        if odd and (problem := problem_of(source, tensor)):
            result.faults = NotFinite.of(tensor.name, problem)  # no value can be compared with them
        elif self._good_scales:  # otherwise every element would be reported again
            compensated = self._judge.max_error is None
            result.faults += self._judge.faults(self._linear.codes_tensor.name)
            if self._padding:
                expected = "padding of the last word of a row with 0"
                got = f"{self._padding} other(s)"
                result.faults.append(Fault(self._linear.codes_tensor.name, expected, got))
            result.faults += self._scale_faults(compensated=compensated)
            result.linears = [self._finding(compensated=compensated)]
            result.absmax = {self._module: float(self._absmax.max())}
        return result

    def _scale_faults(self, *, compensated: bool) -> list[Fault]:
        scheme, rule, whole = self._scheme, self._demand.rule.scales, self._whole
        sides = self._output, scheme, self._module
        if rule == "positive" or scheme.granularity == "tensor":
            return []
        if rule == "about-absmax":
            of = self._linear.scale, self._absmax
            return about_absmax_faults(*sides, *of, compensated=compensated)
        dtype = self._demand.scale_dtype if scheme.number.is_integer and whole is None else None
        return scale_faults(*sides, self._absmax, whole, rule, dtype=dtype)

    def _finding(self, *, compensated: bool) -> LinearFinding:
        scheme, words = self._declared, None
        if self._demand.rule.scales == "about-absmax" and scheme.number.is_integer:
            of = self._output.tensors[self._scales], scheme, self._linear.scale, self._absmax
            scales = "of two stages" if scheme.first_stage else integer_scale_rule(*of)
            words = f"scales {scales}, {'compensating' if compensated else 'nearest'} codes"
        relative = (self._square_error / self._square) ** 0.5 if self._square else 0.0
        return LinearFinding(
            module=self._module,
            wrong_codes=self._judge.wrong,
            max_error=self._judge.max_error,
            relative_l2_error=float(relative),
            found=words,
        )


def _sum_of_squares(x: Floats) -> float:
    """Sum in float32 over some thousand elements, and in float64 over these sums.

    BLAS would use more than one thread for longer ones.
    """
    flat, step = x.reshape(-1), 8192
    parts = (flat[first : first + step] for first in range(0, flat.size, step))
    return sum(float(np.dot(part, part)) for part in parts)
