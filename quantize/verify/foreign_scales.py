"""Scales of other tools: those of absmax but for the roundings of these tools."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..files.checkpoint import Checkpoint
from ..stored.declarations import DeclaredScheme
from ..stored.decode import Floats, floats, read_whole
from ..stored.linear import INVERSE_SCALE, global_scale, matrix_scale
from ..stored.parts import scale_suffix
from .report import Fault
from .rounding import e4m3_rounded

INT4_HALF_RANGE = 7.5  # scale = absmax / 7.5
INT4_SMALLEST_SCALE = 2.0**-23
FP8_MAX = 448.0
FP4_MAX = 6.0
E4M3_SMALLEST = 2.0**-9
# scale = absmax / divisor, rounded to the scale's dtype: half an ulp, and one float32 division.
_SLACK = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-8}
_BF16_HALF_STEP = 2.0**-8
_GLOBAL_SLACK = 2.0**-20  # a few float32 roundings, and those of an inverse
_F16_SMALLEST_STEP = 2.0**-24
# Half a step of F8_E4M3, relative above 2^-6 and absolute below, and float32 roundings.
_E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP = 2.0**-4 + 2.0**-20, 2.0**-10 + 2.0**-20

Doubles = npt.NDArray[np.float64]


def about_absmax_faults(
    output: Checkpoint, scheme: DeclaredScheme, module: str, scale: Floats, absmax: Floats
) -> list[Fault]:
    """Scales that absmax does not give; what is all zero may have any FP8 or FP4 scale.

    The one scale of a whole matrix is not judged here: see `about_matrix_scale_faults`.

    Args:
        output: the quantized folder.
        scheme: what it declares.
        module: on-disk name of the linear.
        scale: [out_features, groups] or [1, 1], as stored, finite and positive.
        absmax: [out_features, groups] of the source weight.
    """
    if scheme.granularity == "tensor":
        return []
    name = f"{module}.{scale_suffix(scheme)}"
    largest = _covered(absmax.astype(np.float64), scheme)
    wide = scale.astype(np.float64)
    if scheme.weight_dtype == "nvfp4":
        return _nvfp4_faults(output, module, name, wide, largest)
    if scheme.first_stage:
        return _second_stage_faults(output, module, name, largest)
    if scheme.weight_dtype == "mxfp4":
        # The largest weight lies in [3.5, 7) scales: exponents come from one rounded mantissa bit.
        ratio = largest / wide
        wrong = ~((ratio >= 3.5) & (ratio < 7)) & (largest > 0) & (wide > 2.0**-127)
        return _faults(name, wrong, wide, largest / 4, "2^(floor(log2(absmax)) - 2), rounded")
    int4 = scheme.weight_dtype == "int4"
    divisor = INT4_HALF_RANGE if int4 else FP8_MAX
    expected = largest / divisor
    if int4:
        expected = np.maximum(expected, INT4_SMALLEST_SCALE)
    dtype = output.tensors[name].dtype
    slack = expected * _SLACK[dtype] + (_F16_SMALLEST_STEP if dtype == "F16" else 0)
    wrong = ~(np.abs(wide - expected) <= slack) & (int4 | (largest > 0))
    return _faults(name, wrong, wide, expected, f"absmax / {divisor:g}")


def _covered(absmax: Doubles, scheme: DeclaredScheme) -> Doubles:
    """Largest magnitude that each scale covers, in the shape of the scales."""
    if scheme.granularity != "block":
        return absmax
    size = scheme.group_size or 1
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
        output: the quantized folder.
        scheme: what it declares.
        absmax: largest magnitude of each source weight, by on-disk module name.
    """
    divisor = FP4_MAX * FP8_MAX if scheme.weight_dtype == "nvfp4" else FP8_MAX
    shared = max(absmax.values())
    faults = []
    for module, own in absmax.items():
        tensor = matrix_scale(output, module)
        scale = float(floats(read_whole(output, tensor), tensor.dtype)[0])
        scale = 1 / scale if tensor.name.endswith(INVERSE_SCALE) else scale
        slack = _GLOBAL_SLACK if scheme.weight_dtype == "nvfp4" else _SLACK[tensor.dtype]
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
