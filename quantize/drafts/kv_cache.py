"""The scales under which engines keep a draft's keys and values in FP8, and of which layers.

An element x is kept as e4m3(x / scale) and read as that times the scale. Scales that a folder does
not store are 1: `vllm/model_executor/layers/quantization/kv_cache.py:143` of vLLM 0.33,
`srt/layers/quantization/kv_cache.py:58` of SGLang 0.5.23.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import CheckpointError

_ATTENTION = re.compile(r"layers\.(\d+)\.self_attn\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """Of one layer: one scale, or one for each key-value head.

    Of latent attention (MLA) one entry is kept, the normed latent and the rotated part of the key
    behind it: k is the scale of the whole entry, v the same number, which nothing reads.

    Attributes:
        k: of the keys as they are kept: normed and rotated.
        v: of the values.
    """

    k: tuple[float, ...]
    v: tuple[float, ...]


UNIT = CacheScales(k=(1.0,), v=(1.0,))
"""What engines take where a folder stores no scales."""

CacheScaleOrigin = Literal["unit", "stored"]


def scale_origin(scales: Mapping[int, CacheScales]) -> CacheScaleOrigin | None:
    """Whether a folder stores any other than 1; None = of no cache in FP8."""
    if not scales:
        return None
    return "unit" if all(one == UNIT for one in scales.values()) else "stored"


def cached_layers(names: Iterable[str], draft: object) -> tuple[int, ...]:
    """The numbers N of the layers "layers.N.self_attn.", in order.

    Args:
        draft: what is named where there is none.

    Raises:
        CheckpointError: the draft has no attention, so no KV cache.
    """
    found = {int(match[1]) for name in names if (match := _ATTENTION.match(name))}
    if not found:
        raise CheckpointError(
            draft,
            "no layer of this draft has attention, so there is no KV cache",
            fix="leave kv_cache (of a recipe) or --kv-cache-dtype out",
        )
    return tuple(sorted(found))
