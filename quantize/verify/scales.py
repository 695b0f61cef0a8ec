"""What is demanded of codes and scales, and scales computed again: bit for bit what is written.

Every rule is one float32 division and one rounding to what is stored, to nearest, ties to even; in
numpy, while the writing side uses torch. All-zero weights get a constant scale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...recipes.errors import VerifyError
from ...recipes.formats import WeightDtype
from ...recipes.schema import Recipe
from ..files.checkpoint import PROVENANCE_FILE, Checkpoint
from ..files.provenance import Method
from ..files.safetensors_header import DTYPE_BYTES, FloatDtype, TensorInfo
from ..stored.decoded_numbers import (
    Bytes,
    Floats,
    blocks_of,
    floats,
    read_rows,
    read_whole,
    stored_scalar,
)
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.linear import INVERSE_SCALE, matrix_scale, stored_scales
from ..stored.stored_declaration import INPUT_SCALES
from .comparison import Fault

E4M3_MAX, E2M1_MAX = 448.0, 6.0
INTEGER_SMALLEST_SCALE = np.float32(2.0**-23)
E4M3_SMALLEST = np.float32(2.0**-9)
E8M0_SMALLEST = np.float32(2.0**-127)
QUARTER = Fraction(1, 4)
"""Share of the absmax scale where searches end at the lower side."""
_FLOATS: dict[str, FloatDtype] = {"BF16": "BF16", "F16": "F16", "F32": "F32"}
_EXPONENT = np.uint32(0x7F800000)
_BLOCK = 2**21  # bytes
_SCALES = 2**16  # small groups have a sixteenth as many scales as weights: take a few at a time
_PAIRWISE = 128  # groups smaller than this are reduced pair by pair: short loops are slow
Bits = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRule:
    """What is demanded of every quantized linear.

    Attributes:
        scales: "absmax": bit for bit those of the largest magnitudes. "searched": those of rows and
            groups between the ends of the search (`searched_shares`), that of a whole matrix
            exact. "positive": finite and above zero. "about-absmax": those of absmax except for
            the roundings of other tools; for INT4, any of their rules.
        codes: "nearest": bit for bit the nearest to weight / stored scale, as this package divides.
            "near": not much further off than these, see `Near`. "about-nearest": nearest except
            for the roundings of other tools; for INT4 also those of GPTQ.
        corrected: weights were first changed to correct the rounding of inputs, as recorded.
    """

    scales: Literal["absmax", "searched", "positive", "about-absmax"]
    codes: Literal["nearest", "near", "about-nearest"]
    corrected: bool = False

    @property
    def of_our_own(self) -> bool:
        """True if bits are compared with a recipe of this package, which stores in one way only."""
        return self.codes != "about-nearest"

    def __str__(self) -> str:
        corrected = ", of weights with input correction" if self.corrected else ""
        return f"{_WORDS[self.scales]}, {_WORDS[self.codes]}{corrected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is declared for one matrix, and what its codes and scales must satisfy.

    Attributes:
        carried: the number format of the codes, where a wider one stores them; else None.
        scale_dtype: safetensors dtype to which INT4 scales were rounded; they may be stored in a
            wider one.
        from_inverse: the scale of the matrix was transcoded from its inverse.
        exponent: k; the first half of the weight's columns was multiplied by 2^k.
        largest: magnitude that the one scale of the matrix must cover; None where there is no
            such scale, or where the rule does not say what it must be.
        group: on-disk names of the linears whose largest magnitude `largest` is.
    """

    scheme: DeclaredScheme | None
    recipe: Recipe | None
    rule: CodeRule
    carried: WeightDtype | None
    scale_dtype: str
    from_inverse: bool
    exponent: int = 0
    largest: np.float32 | None = None
    group: tuple[str, ...] = ()


_WORDS = {
    "absmax": "exact absmax scales",
    "searched": "scales of a search around absmax",
    "positive": "positive scales",
    "about-absmax": "scales of other tools (absmax; of INT4 also searched ones)",
    "nearest": "exactly the nearest quantized values",
    "near": "quantized values with at most 4 times the error of the nearest",
    "about-nearest": "quantized values of other tools (nearest; of INT4 also GPTQ's)",
}
FOREIGN = CodeRule(scales="about-absmax", codes="about-nearest")
"""The rule for a folder that another tool made."""
_LEARNED = CodeRule(scales="positive", codes="near")
_RULES: Mapping[tuple[str, str], CodeRule] = {
    ("absmax", "nearest"): CodeRule(scales="absmax", codes="nearest"),
    ("mse", "nearest"): CodeRule(scales="searched", codes="nearest"),
    ("absmax", "gptq"): CodeRule(scales="absmax", codes="near"),
    ("mse", "gptq"): CodeRule(scales="searched", codes="near"),
    ("absmax", "learned"): _LEARNED,
    ("mse", "learned"): _LEARNED,
}
"""The rule by the recipe's `scale` and `rounding`."""


def rule_of(method: Method | None, *, regrouped: bool = False) -> CodeRule:
    """The rule for a recipe's algorithm; VerifyError if unknown; None = another tool's folder.

    `regrouped`: scales are those of larger groups, which MXFP4 had.
    """
    if method is None:
        return _LEARNED if regrouped else FOREIGN
    algorithm = method.recipe.algorithm
    rule = _RULES.get((algorithm.scale, algorithm.rounding))
    if rule is None:
        where = f"{PROVENANCE_FILE}: recipe.algorithm"
        raise VerifyError(
            where,
            f"scale {algorithm.scale!r} with rounding {algorithm.rounding!r}: what its codes must"
            " be is not known",
            fix="use a version of draftquant that knows this algorithm",
        )
    return replace(rule, corrected=algorithm.input_correction == "auto")


def rounded_bytes(values: Floats, dtype: FloatDtype) -> Bytes:
    """Finite float32 values as stored bytes.

    BF16 is the upper half of a float32: adding half of the lower half, less one where the result is
    even already, carries exactly when the nearest value is the next one.
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        halves = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return halves.reshape(-1).view(np.uint8)
    kind = np.float16 if dtype == "F16" else np.float32
    return np.ascontiguousarray(values, kind).reshape(-1).view(np.uint8)


def rounded_values(values: Floats, dtype: FloatDtype) -> Floats:
    """Finite float32 values rounded to `dtype`, of the same shape."""
    with np.errstate(over="ignore"):  # infinity is reported as a fault
        return floats(rounded_bytes(values, dtype), dtype).reshape(values.shape)


def e4m3_rounded(x: Floats, *, out: Floats | None = None, step: Floats | None = None) -> Floats:
    """Nearest values of F8_E4M3, saturating at 448; x's shape. Zero has no sign.

    Between powers of two 2^e and 2^(e+1) they are 2^(e-3) apart, and 2^-9 below 2^-6. `out` is
    written and returned, and may be x; `step` is overwritten, and is not `out`.
    """
    return _rounded(x, E4M3_MAX, 2.0**-6, 2.0**-3, out, step)


def e2m1_rounded(x: Floats, *, out: Floats | None = None, step: Floats | None = None) -> Floats:
    """Nearest of the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; as `e4m3_rounded`."""
    return _rounded(x, E2M1_MAX, 1.0, 0.5, out, step)


def _rounded(
    x: Floats,
    largest: float,
    smallest_power: float,
    steps: float,
    out: Floats | None,
    step: Floats | None,
) -> Floats:
    """Round to multiples of `steps` times the power of two below x, `smallest_power` at least.

    The bits of a float32 sum between 2^23 and 2^24 steps that are below a step are rounded to
    nearest, ties to even. Adding 1.5 * 2^23 steps keeps sums of both signs in that range.
    """
    out = np.clip(x, np.float32(-largest), np.float32(largest), out=out)
    step = np.empty_like(out) if step is None else step
    np.bitwise_and(out.view(np.uint32), _EXPONENT, out=step.view(np.uint32))
    np.maximum(step, np.float32(smallest_power), out=step)
    np.multiply(step, np.float32(1.5 * 2.0**23 * steps), out=step)
    np.add(out, step, out=out)
    return np.subtract(out, step, out=out)


def sign_bytes(negative: npt.NDArray[np.bool_]) -> Bytes:
    """One byte for every two elements: bit 3 is set where the first is true, bit 7 the second."""
    pairs = negative.reshape(-1).view(np.uint16)
    return (pairs << np.uint16(3) | pairs >> np.uint16(1)).astype(np.uint8) & np.uint8(0x88)


def values_of(bits: Bits, dtype: str) -> Floats:
    """The numbers that bit patterns of `dtype` stand for, in the same shape."""
    return floats(bits.reshape(-1).view(np.uint8), dtype).reshape(bits.shape)


def magnitudes(bits: Bits) -> Bits:
    """Bit patterns of floating-point numbers without their sign: they sort as the magnitudes do.

    NaN is above infinity. Integers of half the width compare in half the time.
    """
    return np.bitwise_and(bits, bits.dtype.type(np.iinfo(bits.dtype).max >> 1))


def group_absmax(bits: Bits, group: int) -> Bits:
    """Largest magnitude of every `group` inputs of a row; the last group may be shorter.

    Input and output are patterns of floating-point numbers: [rows, in_features] -> [rows, groups].
    """
    largest, columns = magnitudes(bits), bits.shape[1]
    if columns % group:
        shorter: Bits = np.maximum.reduceat(largest, np.arange(0, columns, group), axis=1)
        return shorter
    if group < _PAIRWISE and not group & (group - 1):
        while largest.shape[1] * group > columns:
            largest = np.maximum(largest[:, 0::2], largest[:, 1::2])
        return largest
    of_groups: Bits = largest.reshape(len(bits), -1, group).max(axis=2)
    return of_groups


def matrix_absmax(source: Checkpoint, tensor: TensorInfo, exponent: int) -> np.float32:
    """Largest magnitude of a weight whose first half of columns is multiplied by 2^exponent."""
    rows, columns = tensor.shape
    kind = np.uint32 if tensor.dtype == "F32" else np.uint16
    largest = np.zeros(2, kind)
    per_block = max(1, _BLOCK // max(1, columns * DTYPE_BYTES[tensor.dtype]))
    for block in blocks_of(rows, per_block):
        bits: Bits = read_rows(source, tensor, block.start, block.stop).view(kind)
        sizes = magnitudes(bits.reshape(-1, columns))
        halves = sizes[:, : columns // 2], sizes[:, columns // 2 :]
        largest = np.maximum(largest, [half.max(initial=0) for half in halves]).astype(kind)
    first, second = floats(largest.view(np.uint8), tensor.dtype)
    return np.float32(max(np.ldexp(first, exponent), second))


def whole_steps(scheme: DeclaredScheme) -> float:
    """The divisor of a matrix's largest magnitude: the largest code; for NVFP4 times 448."""
    return E2M1_MAX * E4M3_MAX if scheme.number.global_scale else E4M3_MAX


def half_range(scheme: DeclaredScheme) -> float:
    """The divisor of integers: half of all steps between the smallest and the largest code."""
    return scheme.number.largest + 0.5


def whole_scale(scheme: DeclaredScheme, largest: np.float32) -> np.float32:
    """The one scale of a matrix: that of FP8, of a first stage, or over NVFP4's groups.

    `largest` is the magnitude that it must cover, in the matrix and those fused with it.
    """
    scale = largest / np.float32(whole_steps(scheme))
    return scale if scale > 0 else np.float32(1)


def absmax_scales(
    largest: Floats, scheme: DeclaredScheme, dtype: str, whole: np.float32 | None
) -> Floats:
    """The scales of rows, groups or blocks, in the shape of `largest`, the magnitudes they cover.

    `dtype` is that of the stored scales; `whole` is the scale of the matrix over them, if any.
    """
    if scheme.number.powers_of_two:
        return _powers_of_two(largest)
    if scheme.number.global_scale:
        return _nvfp4_scales(largest, whole, np.float32(1))
    if scheme.number.is_fp8:
        scale = largest / np.float32(E4M3_MAX)
        return np.where(scale > 0, scale, np.float32(1))
    if whole is not None:  # rounding keeps the largest the largest
        largest = e4m3_rounded(largest / whole)
    scale = np.maximum(largest / np.float32(half_range(scheme)), INTEGER_SMALLEST_SCALE)
    return rounded_values(scale, _FLOATS[dtype])


def _nvfp4_scales(largest: Floats, whole: np.float32 | None, share: np.float32) -> Floats:
    """The scales, rounded once, from values that are not FP8 yet."""
    assert whole is not None
    exact = largest / (np.float32(E2M1_MAX) * whole)
    scale = np.clip(exact * share, E4M3_SMALLEST, E4M3_MAX)
    return e4m3_rounded(np.where(largest > 0, scale, np.float32(1)))


def searched_shares(scheme: DeclaredScheme) -> tuple[Fraction, Fraction]:
    """The ends of a search: the smallest and the largest share of the absmax scale.

    At the upper end NVFP4's largest weight becomes the code 4, and INT4's 7 instead of 7.5, which
    is not a code. Folders of earlier builds reach the lower end for FP4.
    """
    if scheme.number.global_scale:
        return QUARTER, Fraction(6, 4)
    steps = Fraction(half_range(scheme)) / Fraction(scheme.number.largest)
    return QUARTER, steps if scheme.number.is_integer else Fraction(1)


def share_of_scales(
    share: Fraction, largest: Floats, scheme: DeclaredScheme, dtype: str, whole: np.float32 | None
) -> Floats:
    """A share of what `absmax_scales` returns, rounded to what is stored: where a search ends."""
    factor = np.float32(share)
    if scheme.number.global_scale:
        return _nvfp4_scales(largest, whole, factor)
    scale = absmax_scales(largest, scheme, dtype, whole)
    if scheme.number.powers_of_two:
        return np.maximum(scale, E8M0_SMALLEST / factor) * factor
    if scheme.number.is_fp8:
        return scale * factor
    return rounded_values(np.maximum(scale * factor, INTEGER_SMALLEST_SCALE), _FLOATS[dtype])


def _powers_of_two(largest: Floats) -> Floats:
    """2^(floor(log2(absmax')) - 2), where absmax' is absmax rounded up to one bit of mantissa.

    In bits: half of the second mantissa bit carries into the exponent from 1.75 on. The exponent
    lies in -127 .. 127; an absmax' of infinity gets the largest.
    """
    fields = (largest.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)
    exponents = np.clip(fields.astype(np.int32) - 127 - 2, -127, 127)
    return np.ldexp(np.float32(1), np.where(fields == 255, 127, exponents))


def whole_scale_faults(
    output: Checkpoint, scheme: DeclaredScheme, module: str, demand: Demand
) -> list[Fault]:
    """The one scale of a matrix is that of the largest magnitude of a fused group, bit for bit."""
    assert demand.largest is not None
    tensor, scale, how = matrix_scale(output, module), whole_scale(scheme, demand.largest), ""
    # compressed-tensors' NVFP4 divides by what it stores. Engines multiply by the inverse, which
    # may differ from `scale` in the last digit; a folder transcoded from it stores the inverse.
    if tensor.name.endswith(INVERSE_SCALE):
        scale, how = np.float32(1) / scale, ", inverse"
    elif demand.from_inverse:
        scale, how = np.float32(1) / (np.float32(1) / scale), ", inverse of the inverse"
    stored = stored_scalar(output, tensor)
    if stored == scale:
        return []
    of = f" of {', '.join(demand.group)}" if len(demand.group) > 1 else ""
    expected = f"absmax{of} / {whole_steps(scheme):g}{how} ({scale:.9g})"
    return [Fault(tensor.name, expected, f"{stored:.9g}")]


def scale_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    absmax: Floats,
    whole: np.float32 | None,
    rule: str,
    *,
    dtype: str | None,
) -> list[Fault]:
    """Scales of rows, groups or blocks that do not follow from the largest magnitudes.

    Args:
        absmax: [out_features, groups] of the source weight.
        whole: the scale of the matrix over them, or None.
        rule: "absmax": exactly these. "searched": between the ends of a search.
        dtype: to which scales were rounded; None = the dtype in which they are stored.
    """
    tensor = output.tensors[f"{module}.{scheme.layout.scale_suffix(scheme)}"]
    stored = stored_scales(output, scheme, module)
    size = scheme.group_size or 1 if scheme.granularity == "block" else 1
    count, first = 0, None
    for rows in blocks_of(len(stored), max(1, _SCALES // max(1, stored.shape[1]))):
        part = absmax[rows.start * size : rows.stop * size]
        largest = np.maximum.reduceat(part, np.arange(0, len(part), size), axis=0)
        some = stored[rows.start : rows.stop]
        with np.errstate(all="ignore"):  # non-finite values equal nothing, or are faults already
            of = largest, scheme, dtype or tensor.dtype, whole
            wanted = absmax_scales(*of)
            wrong = some != wanted
            if rule == "searched":
                least, most = (share_of_scales(end, *of) for end in searched_shares(scheme))
                wrong = ~((some >= least) & (some <= most))
        if wrong.any() and first is None:
            row, group = map(int, np.argwhere(wrong)[0])
            first = rows.start + row, some[row, group], wanted[row, group]
        count += int(np.count_nonzero(wrong))
    if first is None:
        return []
    row, got_scale, wanted_scale = first
    says = f"{_rule_in_words(scheme)} ({wanted_scale:.9g})"
    expected = says if rule == "absmax" else "{} to {} of ".format(*searched_shares(scheme)) + says
    got = f"{count} other(s), first {got_scale:.9g} at row {row * size}"
    return [Fault(tensor.name, expected, got)]


def _rule_in_words(scheme: DeclaredScheme) -> str:
    if scheme.first_stage:
        return f"absmax of the FP8 values / {half_range(scheme):g}"
    number = scheme.number
    if number.powers_of_two:
        return "2^(floor(log2(absmax)) - 2), rounded"
    steps = half_range(scheme) if number.is_integer else number.largest
    return f"absmax / ({steps:g} * global scale)" if number.global_scale else f"absmax / {steps:g}"


def companion_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    tensor: TensorInfo,
    values: Mapping[str, TensorInfo],
    *,
    symmetric: bool,
) -> Iterator[Fault]:
    """Zero points, stored shape and input scale of a linear, from its stored tensors by suffix.

    `symmetric` codes count from the middle of their range, even where others could be stored.
    """
    constant = symmetric or not scheme.layout.zeros(scheme)
    for suffix, byte in scheme.layout.zero_points.items() if constant else ():
        if suffix in values and (read_whole(output, values[suffix]) != byte).any():
            what = f"{byte & 15} in every nibble" if byte else "all zero"
            got = "another zero point" if byte else "a non-zero zero point"
            yield Fault(values[suffix].name, f"{what} (symmetric)", got)
    if "weight_shape" in values:
        shape, wanted = values["weight_shape"], list(tensor.shape)
        stored_shape = read_whole(output, shape).view(np.int64).tolist()
        if stored_shape != wanted:
            yield Fault(shape.name, f"{wanted}", f"{stored_shape}")
    for suffix in INPUT_SCALES:
        if suffix in values:
            scale = stored_scalar(output, values[suffix])
            if not 0 < scale < float("inf"):
                yield Fault(values[suffix].name, "a finite scale > 0", str(scale))
