"""FP4 E2M1 in groups: NVFP4 by the rule of NVIDIA ModelOpt 0.47, MXFP4 by that of AMD Quark 0.13.

Bit for bit: the differential tests hold both against the toolkits themselves.
"""

import functools

import torch
from torch import Tensor

from .absmax import over, row_absmax
from .fp8 import FP8, FP8_MAX

SMALLEST_E4M3 = 2.0**-9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of FP4: 2 exponent bits, 1 mantissa bit; code 8 + i is -E2M1[i]."""
FP4_MAX = E2M1[-1]
NEGATIVE_ZERO = 8
_EXPONENT, _EXPONENT_OF_ONE = 0x7F800000, 0x3F800000


def nvfp4_global_scale(absmax: Tensor) -> Tensor:
    """Scale = absmax / (6 * 448), float32: so that the largest group scale is 448.

    Source: ModelOpt 0.47 `NVFP4QTensor`. An all-zero weight gets 1 (ModelOpt: 0, then NaN).
    """
    scale = over(absmax.float(), FP4_MAX * FP8_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def nvfp4_scale(groups: Tensor, global_scale: Tensor) -> Tensor:
    """Scale = e4m3(clamp(absmax / (6 * global_scale), 2^-9, 448)); an all-zero group gets 1.

    Args:
        groups: [number of groups, 16], finite.
        global_scale: [] float32.

    Returns:
        [number of groups, 1] float8_e4m3fn.
    """
    absmax = row_absmax(groups).float()
    scale = (absmax / (FP4_MAX * global_scale)).clamp_(SMALLEST_E4M3, FP8_MAX)
    return torch.where(absmax > 0, scale, torch.ones_like(scale)).to(FP8)


def mxfp4_scale(groups: Tensor) -> Tensor:
    """Scale = 2^(floor(log2(absmax')) - 2), absmax' rounded to one bit of mantissa: Quark's "even".

    Adding 2^21 to the bits of a float32 carries into the exponent from mantissa 1.75 on: so the
    largest value, at most 6 by the format, is not clamped more often than needed. The exponent lies
    in [-127, 127]; an all-zero group gets the smallest, one that rounds to infinity the largest.

    Args:
        groups: [number of groups, 32], finite.

    Returns:
        [number of groups, 1] float32, powers of two.
    """
    bits = row_absmax(groups).float().view(torch.int32) + (1 << 21)
    exponent = ((bits >> 23) - 127 - 2).clamp(-127, 127)
    exponent = exponent.masked_fill(bits >> 23 == 255, 127)
    powers = torch.where(exponent < -126, 1 << 22, exponent + 127 << 23)  # 2^-127 is subnormal
    return powers.to(torch.int32).view(torch.float32)


def fp4_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of x, ties to the even code; magnitudes above 5 give 6.

    Args:
        x: float32, weights divided by their scales.

    Returns:
        uint8 in [0, 15], x's shape: bit 3 is set where x < 0, also if x rounds to zero.
    """
    # Zero has no sign here, and what is no number is zero.
    finite = x.nan_to_num(0.0).add_(0.0)
    sign = (finite.view(torch.int32) >> 31).to(torch.uint8) & NEGATIVE_ZERO
    size = finite.abs_().clamp_(max=FP4_MAX)
    # A sum of 2^22 or more has no bits below 0.5 (2^23: below 1, 2^24: below 2): adding rounds to
    # nearest, ties to even, and leaves the number of these steps in the low byte. Codes are the
    # halves below 2, 2 + the ones below 4, and 4 + the twos: of the three always the smallest.
    halves = _low_bytes(size + 2.0**22)
    ones = _low_bytes(size + (2.0**23 + 2))
    twos = _low_bytes(size.add_(2.0**24 + 2 * 4))
    return torch.minimum(torch.minimum(halves, ones), twos) | sign


def _low_bytes(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.uint8)


def fp4_rounded(x: Tensor) -> Tensor:
    """The values of the nearest E2M1 codes: `fp4_values(fp4_codes(x))`, without the codes between.

    Magnitudes are 0.5 apart below 2, 1 below 4 and 2 above, and the even code of a tie is the even
    multiple of that step.

    Args:
        x: float32, any device.

    Returns:
        float32, x's shape; -0 where a negative number rounds to zero.
    """
    size = x.abs().clamp_(max=FP4_MAX)
    # 2^22 times the power of two below, and not below 1: sums have no bits below the step.
    power = (size.view(torch.int32) & _EXPONENT).clamp_(min=_EXPONENT_OF_ONE)
    large = power.add_(22 << 23).view(torch.float32)
    return size.add_(large).sub_(large).copysign_(x)


def mxfp4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Codes = e2m1(group / scale); a negative number that rounds to zero gets the code of +0.

    So does Quark 0.13 `scaled_real_quantize`; ModelOpt 0.47 keeps the sign (NVFP4).

    Args:
        groups: [number of groups, 32], finite.
        scale: [number of groups, 1] float32.

    Returns:
        [number of groups, 32] uint8 in [0, 15], never 8.
    """
    codes = fp4_codes(groups.float() / scale)
    return codes & (-(codes & 7) | 7)  # bit 3 of -1 .. -7 is set, of 0 it is not


def fp4_values(codes: Tensor) -> Tensor:
    """E2M1 codes -> their values, float32."""
    return _values_on(codes.device)[codes.long()]


@functools.cache
def _values_on(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
