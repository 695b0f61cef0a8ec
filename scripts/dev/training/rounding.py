"""Plain weight rounding, to see that a draft's figures react to quantization as they should."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .draft import Draft

RoundTrip = Callable[[Tensor], Tensor]


def int4_per_channel(weight: Tensor) -> Tensor:
    """INT4 absmax: scale[o] = max_i |w[o, i]| / 7.5, codes = clamp(round(w / scale), -8, 7).

    Args:
        weight: [out_features, in_features] float32.

    Returns:
        codes * scale, same shape and dtype.
    """
    scale = weight.abs().amax(dim=1, keepdim=True) / 7.5
    return (weight / scale).round().clamp(-8, 7) * scale


def fp8_per_channel(weight: Tensor) -> Tensor:
    """FP8 E4M3: scale[o] = max_i |w[o, i]| / 448.

    Args:
        weight: [out_features, in_features] float32.

    Returns:
        The rounded weight, same shape and dtype.
    """
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded(draft: Draft, round_trip: RoundTrip) -> Draft:
    """The draft with attention and MLP projections that went through `round_trip`."""
    rounded_weights = {name: round_trip(draft.weights[name]) for name in draft.quantized_weights()}
    return dataclasses.replace(draft, weights={**draft.weights, **rounded_weights})
