"""What vLLM's build for this CPU lacks: without AVX-512 the product that reads INT4 weights.

Such a build loads the weights, says that it is healthy, and dies at the first request: `'_C' object
has no attribute 'cpu_gemm_wna16'`.
"""

import dataclasses
import json
from pathlib import Path

import torch
from draftquant.quantize.drafts.draft_cache import FP8_MAX
from draftquant.quantize.stored.loading import LoadedDraft
from torch import Tensor

NOTE = (
    "this CPU has no AVX-512, and vLLM's build for it no product with INT4 weights: those drafts"
    " are served dequantized, the same codes as BF16 weights"
)


def has_int4_product(cpuinfo: str) -> bool:
    """Whether a CPU with this /proc/cpuinfo gets the build that has it; other kinds of CPU do."""
    flags = [line.split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return all("avx512f" in words for words in flags)


def needs_it(draft: Path) -> bool:
    """Whether a folder holds INT4 weights that are multiplied as such: those of compressed-tensors
    with inputs that nobody rounds."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    groups = (config.get("quantization_config") or {}).get("config_groups") or {}
    return any(
        (group.get("weights") or {}).get("num_bits") == 4
        and (group.get("weights") or {}).get("type") == "int"
        and not group.get("input_activations")
        for group in groups.values()
    )


# ---- vLLM 0.32 rounds keys and values to FP8 towards zero on a CPU, where GPUs round to nearest
# Found by giving every finite BF16 value to its op `cpu_attn_reshape_and_cache`, under four scales:
# all codes are those of `towards_zero`.


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
