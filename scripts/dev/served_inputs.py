"""Inputs of FP4 linears, rounded as engines do it and as they could.

What engines do is replay's own rounding (`quantize.stored.activations`); the rest is here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...quantize.numerics.fp4 import FP4_MAX, fp4_rounded
from ...quantize.numerics.fp8 import FP8, FP8_MAX
from ...quantize.stored.activations import InputRounding
from ...quantize.stored.layouts.scheme import Activations

Format = Callable[[Tensor, Tensor | None], Tensor]
"""Of inputs [..., in_features] float32 and their static scale, or None: codes times scales."""
FOUR_OVER_SIX = 6 / 4
"""Times the usual scale of a block, so that its largest value becomes 4: 3 is then 3/4 of it."""
READERS: Mapping[str, tuple[str, ...]] = {
    "q/k/v": ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"),
    "o": ("o_proj",),
    "gate/up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The inputs of a layer -> the linears that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One way to round inputs.

    Attributes:
        name: in tables. inputs: a key of `FORMATS`.
        but: inputs of `READERS` that are rounded otherwise -> a key of `FORMATS`.
    """

    name: str
    inputs: str
    but: Mapping[str, str] = field(default_factory=dict)


class ServedInputs:
    """`OnInput` of an engine.

    Args:
        engine: how it rounds.
        scales: canonical name of every linear whose inputs are rounded -> its static scale as
            kernels have it, None where it has none.
    """

    def __init__(self, engine: Engine, scales: Mapping[str, Tensor | None]) -> None:
        other = {
            leaf: FORMATS[kind] for reads, kind in engine.but.items() for leaf in READERS[reads]
        }
        usual = FORMATS[engine.inputs]
        self._formats = {name: other.get(name.rpartition(".")[2], usual) for name in scales}
        self._scales = scales

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The input `x` of the linear `name` as its kernel reads it."""
        rounded = self._formats.get(name)
        return x if rounded is None else rounded(x.float(), self._scales[name])


def _of_replay(how: Activations) -> Format:
    """As replay rounds what a folder declares so."""

    def rounded(x: Tensor, scale: Tensor | None) -> Tensor:
        scales = {} if scale is None or how != "nvfp4" else {"": scale}
        return InputRounding({"": how}, scales, None)("", x)

    return rounded


def _kept(x: Tensor, _scale: Tensor | None) -> Tensor:
    return x


def _nvfp4_four_over_six(x: Tensor, inverse: Tensor | None) -> Tensor:
    """Each block under the one of two scales that errs less, its largest value 6 or 4."""
    assert inverse is not None  # NVFP4 has one
    groups = _groups(x, 16)
    absmax = groups.abs().amax(-1, keepdim=True)
    return _nearer(groups, [_e4m3_scale(absmax * by, inverse) for by in (1, FOUR_OVER_SIX)])


def _nvfp4_per_token(x: Tensor, _scale: Tensor | None) -> Tensor:
    """The global scale found for each token: its largest value / (6 * 448)."""
    groups = _groups(x, 16)
    absmax = groups.abs().amax(-1, keepdim=True)
    whole = absmax.amax(-2, keepdim=True).clamp(min=2.0**-60)
    return _nearer(groups, [_e4m3_scale(absmax, FP4_MAX * FP8_MAX / whole)])


def _e4m3_scale(absmax: Tensor, inverse: Tensor) -> Tensor:
    stored = (inverse * (absmax / FP4_MAX)).clamp(max=FP8_MAX).to(FP8)
    return stored.float() / inverse


def _mxfp4(exponents: Callable[[Tensor], list[Tensor]], size: int = 32) -> Format:
    """Under powers of two; of several the one that errs least."""

    def rounded(x: Tensor, _scale: Tensor | None) -> Tensor:
        groups = _groups(x, size)
        absmax = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
        return _nearer(groups, [torch.exp2(one) for one in exponents(absmax)])

    return rounded


def _floor(absmax: Tensor) -> Tensor:
    """Of the OCP specification: the largest value becomes 4 to 8, and what is above 6 is 6."""
    return absmax.log2().floor() - 2


def _ceil(absmax: Tensor) -> Tensor:
    """The largest value becomes 3 to 6."""
    return (absmax / FP4_MAX).log2().ceil()


def _even(absmax: Tensor) -> Tensor:
    """The largest value becomes 3.5 to 7, and what is above 6 is 6."""
    exponent = absmax.log2().floor()
    return exponent - 2 + (absmax >= 1.75 * torch.exp2(exponent))


def _mxfp8(x: Tensor, _scale: Tensor | None) -> Tensor:
    """E4M3 under the least power of two for 32 that clamps nothing."""
    groups = _groups(x, 32)
    absmax = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2((absmax / FP8_MAX).log2().ceil())
    rounded = (groups / scale).to(FP8).float() * scale
    return rounded.flatten(-2)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _nearer(groups: Tensor, scales: list[Tensor]) -> Tensor:
    """FP4 under that of the scales which errs least in each group; the first one wins ties."""
    best, least = torch.zeros_like(groups), None
    for scale in scales:
        found = fp4_rounded(groups / torch.where(scale > 0, scale, 1.0)) * scale
        error = (found - groups).square().sum(-1, keepdim=True)
        best = found if least is None else torch.where(error < least, found, best)
        least = error if least is None else torch.minimum(error, least)
    return best.flatten(-2)


FORMATS: Mapping[str, Format] = {
    "BF16": _kept,
    "FP8": _of_replay("token-dynamic"),
    "MXFP8": _mxfp8,
    "NVFP4": _of_replay("nvfp4"),
    "NVFP4, four over six": _nvfp4_four_over_six,
    "NVFP4, global scale per token": _nvfp4_per_token,
    "MXFP4": _of_replay("mxfp4"),
    "MXFP4, scales rounded down": _mxfp4(lambda absmax: [_floor(absmax)]),
    "MXFP4, scales rounded up": _mxfp4(lambda absmax: [_ceil(absmax)]),
    "MXFP4, best of two scales": _mxfp4(lambda absmax: [_even(absmax), _even(absmax) - 1]),
    "MXFP4, groups of 16": _mxfp4(lambda absmax: [_even(absmax)], size=16),
}
"""FP8 is E4M3 under one scale for each token."""
