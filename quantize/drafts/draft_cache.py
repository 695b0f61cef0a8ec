"""A draft's KV cache in FP8: scales of keys and values, their names in folders, and the rounding.

An element x is stored as e4m3(x / scale) and read as that times the scale. Scales that a folder
does not store are 1: `vllm/model_executor/layers/quantization/kv_cache.py:143` of vLLM 0.33,
`srt/layers/quantization/kv_cache.py:58` of SGLang 0.5.23. Whole models rename other tools' names to
`self_attn.attn.k_scale` (`maybe_remap_kv_scale_name`); draft classes of SGLang 0.5.23 read that
name, and drop every other one.

Modelled is what both engines share: keys are cached normed and rotated, every row reads every key
from the cache, its own too, a magnitude beyond 448 times the scale is clipped to that, and the
product of an FP8 value and its scale is exact (kernels scale scores and sums). SGLang stores by
cast, which gave NaN beyond the range before torch 2.12 (pytorch#178817).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...recipes.errors import CheckpointError, PlanError
from .family import Draft, Row
from .geometry import LatentAttention
from .maths import Tensor, torch

FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""
_ATTENTION = re.compile(r"layers\.(\d+)\.self_attn\.")
ToolNames = Callable[[str], tuple[str, str]]
"""On-disk name of an attention -> the names of its two scales, as tools of a layout write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """The scales of one layer: one, or one for each key-value head.

    With MLA, k is the scale of the whole entry, latent and rotated part, and v the same
    number.
    """

    k: tuple[float, ...]
    v: tuple[float, ...]


UNIT = CacheScales(k=(1.0,), v=(1.0,))
"""What engines use where a folder stores no scales."""

CacheScaleOrigin = Literal["unit", "stored"]


def scale_origin(scales: Mapping[int, CacheScales]) -> CacheScaleOrigin | None:
    """Whether a folder stores any scale other than 1; None = its cache is not in FP8."""
    if not scales:
        return None
    return "unit" if all(s == UNIT for s in scales.values()) else "stored"


def cached_layers(names: Iterable[str], draft: object) -> tuple[int, ...]:
    """The numbers N of the layers "layers.N.self_attn." of canonical names, in order."""
    layers = {int(match[1]) for name in names if (match := _ATTENTION.match(name))}
    if not layers:
        raise CheckpointError(
            draft,
            "no layer of this draft has attention, so there is no KV cache",
            fix="leave kv_cache (of a recipe) or --kv-cache-dtype out",
        )
    return tuple(sorted(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSite:
    """The KV cache of one layer, numbered as in `DraftForward`, and the linear of its keys."""

    layer: int
    keys: Row
    attention: str
    whole_model: bool

    @property
    def recorded(self) -> tuple[str, str]:
        """The names of the scales of keys and values in draftquant.json."""
        return f"{self.attention}.k", f"{self.attention}.v"

    def names(self, tool_names: ToolNames) -> tuple[str, str]:
        """On-disk names of the scale of keys and of the scale of values."""
        if self.whole_model:
            return tool_names(self.attention)
        return f"{self.attention}.attn.k_scale", f"{self.attention}.attn.v_scale"


def cache_sites(draft: Draft) -> tuple[CacheSite, ...]:
    """One for each layer; refused where engines read no scales of the draft's cache."""
    layers = cached_layers((row.canonical for row in draft.rows), draft.checkpoint.folder)
    family = draft.family
    reason = family.no_cache_scales
    if reason is None and isinstance(draft.geometry.attention, LatentAttention):
        reason = (
            "its attention is latent (MLA): vLLM 0.33 has no parameter for the scale of a latent"
            " cache, and refuses a draft's folder that stores one"
        )
    if reason is not None:
        raise PlanError(
            draft.checkpoint.folder,
            "the recipe stores scales of the KV cache, which engines do not read of"
            f" {family.name}: {reason}",
            fix="leave kv_cache out. Served with an FP8 cache nevertheless, its scales are 1:"
            " 'draftquant replay --kv-cache-dtype fp8_e4m3' counts what that loses",
        )
    return tuple(_site(draft, layer) for layer in layers)


def _site(draft: Draft, layer: int) -> CacheSite:
    keys = draft.row(f"layers.{layer}.self_attn.k_proj.weight")
    if keys is None:
        raise PlanError(
            draft.checkpoint.folder,
            f"layer {layer} has no k_proj, so nothing is known of its KV cache",
            fix="leave kv_cache out of the recipe",
        )
    return CacheSite(
        layer=layer,
        keys=keys,
        attention=keys.module.rpartition(".")[0],
        whole_model=draft.family.is_whole_model,
    )


class CacheRounding:
    """`OnCache` that rounds keys and values to FP8 E4M3 and back, in the layers that have scales.

    Gradients go straight through, as if nothing were rounded.
    """

    def __init__(self, scales: Mapping[int, CacheScales]) -> None:
        self.scales = scales

    def __call__(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, exactly codes times scales, in float32 or wider."""
        scales = self.scales.get(layer)
        if scales is None:
            return keys, values
        return _rounded(keys, scales.k), _rounded(values, scales.v)


def _rounded(x: Tensor, scale: tuple[float, ...]) -> Tensor:
    factor = torch.tensor(scale, dtype=torch.float32, device=x.device)[:, None, None]
    rounded = as_kept(x.detach().float(), factor)
    rounded = rounded.to(torch.promote_types(x.dtype, torch.float32))
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def as_kept(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3(x / scale) * scale, rounded to nearest, ties to even, saturating; both float32."""
    codes = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32) * scale
