"""How vLLM 0.32 rounds keys and values to FP8 on a CPU: towards zero, where GPUs round to nearest.

Found by giving every finite BF16 value to its op `cpu_attn_reshape_and_cache`, under four scales:
all codes are those of `towards_zero`.
"""

import dataclasses

import torch
from draftquant.quantize.drafts.draft_cache import FP8_MAX
from draftquant.quantize.stored.loading import LoadedDraft
from torch import Tensor


def on_cpu(draft: LoadedDraft) -> LoadedDraft:
    """The draft with its cache rounded as on a CPU, where it has one in FP8."""
    scales = draft.cache_scales
    if not scales:
        return draft

    def on_cache(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        own = scales[layer]
        return _read_back(keys, own.k), _read_back(values, own.v)

    return dataclasses.replace(draft, forward=draft.forward.caching(on_cache))


def towards_zero(x: Tensor) -> Tensor:
    """The E4M3 value of x, or the next one towards zero where x is none; saturating."""
    kept = x.float().clamp(-FP8_MAX, FP8_MAX)
    nearest = kept.to(torch.float8_e4m3fn)
    is_beyond = nearest.float().abs() > kept.abs()
    codes = nearest.view(torch.uint8) - is_beyond.to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


def _read_back(x: Tensor, scale: tuple[float, ...]) -> Tensor:
    factor = torch.tensor(scale, dtype=torch.float32)[:, None, None]
    return towards_zero(x.float() / factor) * factor
