"""Whether stored scales follow the absmax rule of their format, judged from the source weight."""

import numpy as np
import numpy.typing as npt

from .checkpoint import Checkpoint
from .declared import DeclaredScheme
from .decode import Floats, floats, read_whole
from .stored import scale_suffix
from .stored_linear import global_scale
from .verify_report import Fault

INT4_HALF_RANGE = 7.5  # scale = absmax / 7.5
INT4_SMALLEST_SCALE = 2.0**-23
FP8_MAX = 448.0
FP4_MAX = 6.0
E4M3_SMALLEST = 2.0**-9
# scale = absmax / divisor, rounded to the scale's dtype: half an ulp, and one float32 division.
_SLACK = {"BF16": 2.0**-8, "F16": 2.0**-10, "F32": 2.0**-8}
_F16_SMALLEST_STEP = 2.0**-24
# Half a step of F8_E4M3, relative above 2^-6 and absolute below, and float32 roundings.
_E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP = 2.0**-4 + 2.0**-20, 2.0**-10 + 2.0**-20

Doubles = npt.NDArray[np.float64]


def scale_faults(
    output: Checkpoint, scheme: DeclaredScheme, module: str, scale: Floats, absmax: Floats
) -> list[Fault]:
    """Scales that absmax does not give; what is all zero may have any FP8 or FP4 scale.

    Args:
        output: the quantized folder.
        scheme: what it declares.
        module: on-disk name of the linear.
        scale: [out_features, groups] or [1, 1], as stored, finite and positive.
        absmax: [out_features, groups] of the source weight.
    """
    name = f"{module}.{scale_suffix(scheme)}"
    largest = _covered(absmax.astype(np.float64), scheme)
    wide = scale.astype(np.float64)
    if scheme.weight_dtype == "nvfp4":
        return _nvfp4_faults(output, module, name, wide, largest)
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
    if scheme.granularity == "tensor":
        return np.full((1, 1), absmax.max())
    if scheme.granularity != "block":
        return absmax
    size = scheme.group_size or 1
    blocks = np.maximum.reduceat(absmax, np.arange(0, len(absmax), size), axis=0)
    return np.repeat(blocks, size, axis=0)[: len(absmax)]


def _nvfp4_faults(
    output: Checkpoint, module: str, name: str, scale: Doubles, absmax: Doubles
) -> list[Fault]:
    """Global scale = absmax / (6 * 448); group scale = e4m3(absmax / (6 * global scale))."""
    whole = float(global_scale(output, module))
    expected_whole = float(absmax.max()) / (FP4_MAX * FP8_MAX)
    faults = []
    if expected_whole > 0 and abs(whole - expected_whole) > expected_whole * 2.0**-20:
        faults.append(
            Fault(
                where=f"{module}: global scale",
                expected=f"absmax / 2688 ({expected_whole:.6g})",
                got=f"{whole:.6g}",
            )
        )
    tensor = output.tensors[name]
    stored = floats(read_whole(output, tensor), tensor.dtype).reshape(scale.shape)
    expected = np.clip(absmax / (FP4_MAX * whole), E4M3_SMALLEST, FP8_MAX)
    slack = np.maximum(expected * _E4M3_HALF_STEP, _E4M3_SUBNORMAL_HALF_STEP)
    wrong = ~(np.abs(stored.astype(np.float64) - expected) <= slack) & (absmax > 0)
    return faults + _faults(
        name, wrong, stored.astype(np.float64), expected, "absmax / (6 * global scale)"
    )


def _faults(
    name: str, wrong: npt.NDArray[np.bool_], scale: Doubles, expected: Doubles, rule: str
) -> list[Fault]:
    if not wrong.any():
        return []
    row, group = map(int, np.argwhere(wrong)[0])
    got = f"{int(wrong.sum())} other(s), first {scale[row, group]:.6g} at row {row}"
    return [Fault(where=name, expected=f"{rule} ({expected[row, group]:.6g})", got=got)]
