"""Scales of other tools: those of absmax but for the roundings of these tools."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import Floats, floats, read_whole
from ..stored.linear import INVERSE_SCALE, global_scale, matrix_scale
from ..stored.parts import scale_suffix
from .rounded_values import e4m3_rounded
from .verify_report import Fault

INT4_HALF_RANGE = 7.5
MOST_BEYOND_COMPENSATED = 1.5
"""GPTQ takes the scales of a group after the weights before it were made up for in it."""
INT4_LEAST_OF_ABSMAX = 1 / 4
"""Searched scales clip the largest weights; below this, rows are not clipped but cut off."""
_ODD_ONES = 1 / 8
"""Scales of one rule but for fewer than these are damaged, and not searched."""
INT4_SMALLEST_SCALE = 2.0**-23
FP8_MAX = 448.0
FP4_MAX = 6.0
POWERS_OF_TWO = "ue8m0"
"""What a declaration calls FP8 scales that are the next power of two."""
E4M3_SMALLEST = 2.0**-9
# scale = absmax / divisor, rounded to the scale's dtype: half an ulp, and one float32 division.
_SLACK = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-8, "F8_E8M0": 0.0}
_BF16_HALF_STEP = 2.0**-8
_GLOBAL_SLACK = 2.0**-20  # a few float32 roundings, and those of an inverse
_F16_SMALLEST_STEP = 2.0**-24
# Half a step of F8_E4M3, relative above 2^-6 and absolute below, and float32 roundings.
_E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP = 2.0**-4 + 2.0**-20, 2.0**-10 + 2.0**-20

Doubles = npt.NDArray[np.float64]


def about_absmax_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    module: str,
    scale: Floats,
    absmax: Floats,
    *,
    compensated: bool = False,
) -> list[Fault]:
    """Scales that absmax does not give; what is all zero may have any FP8 or FP4 scale.

    The one scale of a whole matrix is not judged here: see `about_matrix_scale_faults`.

    Args:
        scale: [out_features, groups] or [1, 1], as stored, finite and positive.
        absmax: [out_features, groups] of the source weight.
        compensated: codes are not the nearest, but make up for the errors of others.
    """
    if scheme.granularity == "tensor":
        return []
    name = f"{module}.{scale_suffix(scheme)}"
    largest = _covered(absmax.astype(np.float64), scheme)
    wide = scale.astype(np.float64)
    wide = np.abs(wide) if scheme.has_signed_scales else wide
    if scheme.number.global_scale:
        return _nvfp4_faults(output, module, name, wide, largest)
    if scheme.first_stage:
        return _second_stage_faults(output, module, name, largest)
    if scheme.number.powers_of_two:
        # The largest weight lies in [3.5, 7) scales: exponents come from one rounded mantissa bit.
        ratio = largest / wide
        wrong = ~((ratio >= 3.5) & (ratio < 7)) & (largest > 0) & (wide > 2.0**-127)
        return _faults(name, wrong, wide, largest / 4, "2^(floor(log2(absmax)) - 2), rounded")
    if scheme.number.is_integer:
        return _integer_faults(output.tensors[name], scheme, wide, largest, compensated=compensated)
    expected = largest / FP8_MAX
    dtype = output.tensors[name].dtype
    wrong = ~_fits(wide, expected, dtype) & (largest > 0)
    if scheme.version == POWERS_OF_TWO:
        next_power = (np.frexp(wide)[0] == 0.5) & (wide >= expected) & (wide < 2 * expected)
        wrong &= ~next_power
    return _faults(name, wrong, wide, expected, f"absmax / {FP8_MAX:g}")


def integer_scale_rule(
    tensor: TensorInfo, scheme: DeclaredScheme, scale: Floats, absmax: Floats
) -> str:
    """What the scales of integer codes are, in words; of searched ones, from where to where.

    Args:
        tensor: where they are stored.
        scale: see `about_absmax_faults`.
    """
    scale = np.abs(scale)
    sides = scale.astype(np.float64), absmax.astype(np.float64)
    divisor, wrong, _ = _integer_rule(tensor, scheme, *sides)
    if not wrong.any() and not scheme.asymmetric:
        return f"absmax / {divisor:g}"
    half_range = _divisors(scheme)[0]
    share = scale[absmax > 0] * half_range / absmax[absmax > 0]
    how = "of ranges" if scheme.asymmetric else "searched"
    ends = f"{share.min():.2f} to {share.max():.2f}" if share.size else "any"
    return f"{how}, {ends} of absmax / {half_range:g}"


def _divisors(scheme: DeclaredScheme) -> tuple[float, float, float]:
    """What absmax is divided by: half the range, the largest code, or the smallest.

    So do Quark and compressed-tensors; AutoAWQ, GPTQ and ModelOpt; and others.
    """
    half = 2.0 ** (scheme.number.bits - 1)
    return half - 0.5, half - 1, half


def _integer_faults(
    tensor: TensorInfo,
    scheme: DeclaredScheme,
    scale: Doubles,
    absmax: Doubles,
    *,
    compensated: bool,
) -> list[Fault]:
    """Scales of one of the rules; or searched ones, which are of none and only have their ends.

    Those of a range from the smallest to the largest weight are half of these where all weights
    have one sign.
    """
    divisor, wrong, expected = _integer_rule(tensor, scheme, scale, absmax)
    if wrong.mean() < _ODD_ONES and not scheme.asymmetric:
        return _faults(tensor.name, wrong, scale, expected, f"absmax / {divisor:g}")
    _, fewest, many = _divisors(scheme)
    beyond = MOST_BEYOND_COMPENSATED if compensated else 1.0
    most = np.maximum(absmax / fewest * beyond, INT4_SMALLEST_SCALE)
    least = absmax / (2 * many if scheme.asymmetric else many) * INT4_LEAST_OF_ABSMAX
    slack = 2 * _SLACK[tensor.dtype]
    wrong = ~((scale <= most * (1 + slack)) & (scale >= least)) & (absmax > 0)
    what = f"1/4 to {beyond:g} of absmax / {fewest:g}"
    return _faults(tensor.name, wrong, scale, most, what)


def _integer_rule(
    tensor: TensorInfo, scheme: DeclaredScheme, scale: Doubles, absmax: Doubles
) -> tuple[float, npt.NDArray[np.bool_], Doubles]:
    """The divisor that most scales have, the scales that do not, and what they should be."""
    found = []
    for divisor in _divisors(scheme):
        expected = np.maximum(absmax / divisor, INT4_SMALLEST_SCALE)
        found.append((divisor, ~_fits(scale, expected, tensor.dtype), expected))
    return min(found, key=lambda one: int(one[1].sum()))


def _fits(scale: Doubles, expected: Doubles, dtype: str) -> npt.NDArray[np.bool_]:
    """Equal but for the rounding to the stored dtype."""
    slack = expected * _SLACK[dtype] + (_F16_SMALLEST_STEP if dtype == "F16" else 0)
    fits: npt.NDArray[np.bool_] = np.abs(scale - expected) <= slack
    return fits


def _covered(absmax: Doubles, scheme: DeclaredScheme) -> Doubles:
    """Largest magnitude that each scale covers, in the shape of the scales."""
    if scheme.granularity != "block":
        return absmax
    size = scheme.rows_of_scale
    blocks = np.maximum.reduceat(absmax, np.arange(0, len(absmax), size), axis=0)
    return np.repeat(blocks, size, axis=0)[: len(absmax)]


def _nvfp4_faults(
    output: Checkpoint, module: str, name: str, scale: Doubles, absmax: Doubles
) -> list[Fault]:
    """Group scale = e4m3(absmax / (6 * global scale))."""
    whole = float(global_scale(output, module))
    tensor = output.tensors[name]
    stored = floats(read_whole(output, tensor), tensor.dtype).reshape(scale.shape)
    expected = np.clip(absmax / (FP4_MAX * whole), E4M3_SMALLEST, FP8_MAX)
    slack = np.maximum(expected * _E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP)
    wrong = ~(np.abs(stored.astype(np.float64) - expected) <= slack) & (absmax > 0)
    return _faults(name, wrong, stored.astype(np.float64), expected, "absmax / (6 * global scale)")


def _second_stage_faults(
    output: Checkpoint, module: str, name: str, absmax: Doubles
) -> list[Fault]:
    """Scale = absmax / 7.5 of the FP8 values of a row: rounding keeps the largest the largest.

    Other tools round weight / first scale to BF16 before they round it to FP8.
    """
    tensor = output.tensors[name]
    stored = floats(read_whole(output, tensor), tensor.dtype).reshape(absmax.shape)
    wide, slack = stored.astype(np.float64), _SLACK[tensor.dtype]
    quotient = absmax / float(global_scale(output, module))
    least, expected, most = (
        np.maximum(
            e4m3_rounded((quotient * factor).astype(np.float32)) / INT4_HALF_RANGE,
            INT4_SMALLEST_SCALE,
        ).astype(np.float64)
        for factor in (1 - _BF16_HALF_STEP, 1.0, 1 + _BF16_HALF_STEP)
    )
    wrong = ~((wide >= least * (1 - slack)) & (wide <= most * (1 + slack)))
    return _faults(name, wrong, wide, expected, "absmax of the FP8 values / 7.5")


def about_matrix_scale_faults(
    output: Checkpoint,
    scheme: DeclaredScheme,
    absmax: Mapping[str, float],
) -> list[Fault]:
    """The one scale of each matrix of a group that engines fuse: of the largest magnitude, or own.

    Other tools take one from each weight alone.

    Args:
        absmax: largest magnitude of each source weight, by on-disk module name.
    """
    divisor = FP4_MAX * FP8_MAX if scheme.number.global_scale else FP8_MAX
    shared = max(absmax.values())
    faults = []
    for module, own in absmax.items():
        tensor = matrix_scale(output, module)
        scale = float(floats(read_whole(output, tensor), tensor.dtype)[0])
        scale = 1 / scale if tensor.name.endswith(INVERSE_SCALE) else scale
        slack = _GLOBAL_SLACK if scheme.number.global_scale else _SLACK[tensor.dtype]
        allowed = [largest / divisor for largest in (shared, own)]
        if not any(abs(scale - one) <= one * slack or one == 0 for one in allowed):
            of = f" of {', '.join(absmax)}" if len(absmax) > 1 else ""
            wanted = f"absmax{of} / {divisor:g} ({allowed[0]:.6g})"
            faults.append(Fault(where=tensor.name, expected=wanted, got=f"{scale:.6g}"))
    return faults


def _faults(
    name: str, wrong: npt.NDArray[np.bool_], scale: Doubles, expected: Doubles, rule: str
) -> list[Fault]:
    if not wrong.any():
        return []
    row, group = map(int, np.argwhere(wrong)[0])
    got = f"{int(wrong.sum())} other(s), first {scale[row, group]:.6g} at row {row}"
    return [Fault(where=name, expected=f"{rule} ({expected[row, group]:.6g})", got=got)]
