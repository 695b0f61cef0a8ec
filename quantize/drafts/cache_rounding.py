"""Keys and values as an engine reads them back from a KV cache in FP8.

What vLLM 0.33 and SGLang 0.5.23 share is modelled: keys are kept normed and rotated, every row
reads every key from the cache, its own too, a magnitude beyond 448 times the scale is kept as that,
and the product of an FP8 value and its scale is exact (kernels scale scores and sums). SGLang keeps
keys by torch's cast, which gave NaN beyond the range before torch 2.12 (pytorch#178817).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .draft_cache import CacheScales

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class CacheRounding:
    """`OnCache` that rounds the keys and values of some layers to FP8 E4M3 and back.

    Gradients go straight through, as if nothing were rounded.

    Args:
        scales: by layer; layers without any are left alone.
    """

    def __init__(self, scales: Mapping[int, CacheScales]) -> None:
        self.scales = scales

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, exactly codes times scales, in float32 at least."""
        own = self.scales.get(layer)
        if own is None:
            return keys, values
        return _rounded(keys, own.k), _rounded(values, own.v)


def _rounded(x: Tensor, scale: tuple[float, ...]) -> Tensor:
    factor = torch.tensor(scale, dtype=torch.float32, device=x.device)[:, None, None]
    rounded = as_kept(x.detach().float(), factor)
    rounded = rounded.to(torch.promote_types(x.dtype, torch.float32))
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def as_kept(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3(x / scale) * scale, to the nearest, ties to even, saturating; both float32."""
    codes = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32) * scale
