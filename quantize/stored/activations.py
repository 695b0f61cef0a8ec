"""What a kernel sees of a linear's input: rounded to FP8, NVFP4 or MXFP4 and back.

Part of the reading side: it follows what a folder declares and shares no code with what wrote it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...recipes.formats import NUMBER_FORMATS
from ..drafts.forward import OnInput
from .layouts.scheme import GROUPS, INVERTED, Activations

FP8_MAX = NUMBER_FORMATS["fp8_e4m3"].largest
(FP8_GROUP,) = NUMBER_FORMATS["fp8_e4m3"].sizes["block"]  # inputs that share a scale, with blocks
_FP8_GROUPS: Mapping[str, int] = {"group-dynamic": FP8_GROUP, "group-dynamic-64": 64}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = FP4_VALUES[-1]
STATIC: tuple[str, ...] = ("tensor-static", *INVERTED)
"""What has a stored scale, and cannot be rounded without it."""


def kernel_scale(how: Activations, scale: Tensor) -> Tensor:
    """The static scale of a linear's input as `InputRounding` takes it."""
    return 1 / scale if how in INVERTED else scale


class InputRounding:
    """`OnInput` that rounds the inputs of quantized linears and leaves the others alone.

    What it gives is exactly a code times its scale, in float32 at least: kernels multiply codes and
    scale their sums, so that a narrower dtype would round once too often.

    Gradients go straight through, as if nothing were rounded: rounding itself has none.

    Args:
        activations: canonical module name of every quantized linear -> as declared for it.
        scales: canonical module name -> the static scale of a linear's input, [] float32 on the
            device of the inputs, as kernels have it: of FP8 what codes are multiplied by, of NVFP4
            its inverse.
        before: sees every input first; what it returns goes on.

    Raises:
        ValueError: a linear has a static scale by what is declared, and none is given.
    """

    def __init__(
        self,
        activations: Mapping[str, Activations],
        scales: Mapping[str, Tensor],
        before: OnInput | None,
    ) -> None:
        without = [n for n, how in activations.items() if how in STATIC and n not in scales]
        if without:
            raise ValueError(f"a static scale is declared and none is given: {without}")
        self._activations = activations
        self._scales = scales
        self._before = before

    @property
    def rounds_alone(self) -> bool:
        """A token's inputs are rounded whatever other tokens are rounded in the same call."""
        return "tensor-dynamic" not in self._activations.values()

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The input `x` of the linear `name` as its kernel reads it."""
        if self._before is not None:
            x = self._before(name, x)
        how = self._activations.get(name, "none")
        if how == "none":
            return x
        rounded = self._rounded(how, x.detach().to(torch.float32), name)
        rounded = rounded.to(torch.promote_types(x.dtype, torch.float32))
        return rounded + (x - x.detach()) if x.requires_grad else rounded

    def _rounded(self, how: Activations, x: Tensor, name: str) -> Tensor:
        if how == "tensor-static":
            return _fp8(x, self._scales[name])
        if how in INVERTED:
            return _in_groups(x, GROUPS[how], lambda groups: _nvfp4(groups, self._scales[name]))
        if how in GROUPS:
            return _in_groups(x, GROUPS[how], _mxfp4)
        if how in _FP8_GROUPS:
            return _in_groups(x, _FP8_GROUPS[how], lambda groups: _fp8(groups, _fp8_scale(groups)))
        if how == "tensor-dynamic":  # one scale for all tokens of a call
            return _fp8(x, _fp8_scale(x.reshape(1, -1)).reshape(()))
        return _fp8(x, _fp8_scale(x))


def _in_groups(x: Tensor, size: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to [..., groups, size]; the last group may be padded with zeros."""
    padding = -x.shape[-1] % size
    wide = torch.nn.functional.pad(x, (0, padding))
    return rounded(wide.reshape(*x.shape[:-1], -1, size)).flatten(-2)[..., : x.shape[-1]]


def _over(x: Tensor, divisor: float) -> Tensor:
    """The quotient rounded once; by a plain number a GPU would multiply with its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _fp8_scale(x: Tensor) -> Tensor:
    absmax = x.abs().amax(-1, keepdim=True)
    return torch.where(absmax > 0, _over(absmax, FP8_MAX), 1.0)  # a zero token stays zero


def _fp8(x: Tensor, scale: Tensor) -> Tensor:
    codes = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32) * scale


def _nvfp4(groups: Tensor, inverse: Tensor) -> Tensor:
    """Groups of 16 under e4m3(inverse * absmax / 6) / inverse; zero where E4M3 rounds that to zero.

    In this order of operations: that of kernels, and of compressed-tensors 0.20, which has the same
    results bit for bit.
    """
    absmax = groups.abs().amax(-1, keepdim=True)
    scale = (inverse * _over(absmax, FP4_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    scale = scale.to(torch.float32) / inverse
    return _fp4(groups / torch.where(scale > 0, scale, 1.0)) * scale


def _mxfp4(groups: Tensor) -> Tensor:
    """Groups of 32 under 2^(floor(log2(absmax)) - 2), absmax rounded to one bit of mantissa."""
    absmax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(absmax)  # absmax = mantissa * 2^exponent, mantissa in [.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875) - 2
    scale = (exponent.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)
    return _fp4(groups / scale) * scale


def _fp4(x: Tensor) -> Tensor:
    """Nearest of the 16 values, ties to the even mantissa, saturating at 6.

    They are 1/2 apart up to 2, 1 up to 4 and 2 beyond, and mantissas are even at the even multiples
    of these steps.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return size.div_(step).round_().mul_(step).clamp_(max=FP4_MAX).copysign_(x)
