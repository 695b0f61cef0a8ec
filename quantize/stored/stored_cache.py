"""What a folder stores and declares of its KV cache: one scale for keys, one for values, per layer.

Every spelling is read that an engine or a tool has for them. It shares no code with what writes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recipes.errors import CheckpointError
from ...recipes.formats import KvCacheDtype
from ..drafts import Draft, Family
from ..drafts.draft_cache import UNIT, CacheScales
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .decoded_numbers import floats, read_whole
from .layouts.scheme import FLOAT_DTYPES, DeclaredScheme

_SPELLED = re.compile(
    r"(?P<attention>.*\bself_attn)\."
    r"(?:(?:(?:attn|attn_mqa|mla_attn\.mla_attn|[kv]_proj)\.)?(?P<of>k|v|kv)_scale"
    r"|(?P<out>[kv])_proj\.output_scale)$"
)
_LEAST = float(np.finfo(np.float32).tiny)
"""The smallest normal number: engines divide by a scale in float32, in kernels that take smaller
ones for 0."""
_LAYER = re.compile(r"layers\.(\d+)\.self_attn\.")


class CacheTensor(NamedTuple):
    """A stored scale: of which layer, of its keys, its values, or of both."""

    layer: int
    of: str
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKvCache:
    """The KV cache as a folder declares it.

    Attributes:
        dtype: what keys and values are rounded to.
        scales: by number of the layer; those of a layer that stores none are 1, as in engines.
    """

    dtype: KvCacheDtype
    scales: Mapping[int, CacheScales]


def cache_tensors(checkpoint: Checkpoint, family: Family) -> Iterator[CacheTensor]:
    """The stored scales of layers of this family, by name.

    A name of another module is none: what is no draft's is a stranger to every reader.
    """
    for name, tensor in checkpoint.tensors.items():
        found = _SPELLED.fullmatch(name)
        if found is None:
            continue
        layer = _LAYER.match(family.canonical_name(f"{found['attention']}.k_proj.weight"))
        if layer is not None:
            yield CacheTensor(int(layer[1]), found["of"] or found["out"], tensor)


def cache_problems(
    checkpoint: Checkpoint, draft: Draft, scheme: DeclaredScheme | None
) -> Iterator[tuple[str, str, str]]:
    """Where, what is expected, what is there: of each stored scale that no engine can use."""
    per_head = scheme is not None and scheme.cache_per_head
    seen: dict[tuple[int, str], str] = {}
    heads = getattr(draft.geometry, "num_key_value_heads", 1)  # of MLA: one entry
    for layer, of, tensor in cache_tensors(checkpoint, draft.family):
        for part in of:
            other = seen.setdefault((layer, part), tensor.name)
            if other != tensor.name:
                yield tensor.name, f"one {part}_scale of layer {layer}", f"{other} too"
        if tensor.dtype not in FLOAT_DTYPES:
            yield tensor.name, " or ".join(FLOAT_DTYPES), tensor.dtype
            continue
        if tensor.numel not in (1, heads):
            yield tensor.name, f"one scale, or {heads}: one per key-value head", f"{tensor.numel}"
            continue
        if tensor.numel > 1 and not per_head:
            yield tensor.name, "one scale, as declared (no strategy attn_head)", f"{tensor.numel}"
            continue
        values = _values(checkpoint, tensor)
        if small := [value for value in values if 0 < value < _LEAST]:
            least = f"a scale of at least {_LEAST:.3g}: GPUs divide by smaller ones as by 0"
            yield tensor.name, least, f"{small[0]:.3g}"
            continue
        bad = [value for value in values if not (np.isfinite(value) and value > 0)]
        if bad:
            yield tensor.name, "a positive, finite scale", f"{bad[0]:g}"


def cache_scales(
    checkpoint: Checkpoint, draft: Draft, scheme: DeclaredScheme | None
) -> dict[int, CacheScales]:
    """The scales that a folder stores, by number of the layer, whether it declares a cache or not.

    Raises:
        CheckpointError: a scale is not a positive number, stored twice, or not that of a head.
    """
    for where, expected, got in cache_problems(checkpoint, draft, scheme):
        raise CheckpointError(
            f"{checkpoint.folder}: {where}",
            f"a scale of the KV cache: expected {expected}, got {got}",
            fix="run 'draftquant verify', then quantize the draft again",
        )
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for layer, of, tensor in cache_tensors(checkpoint, draft.family):
        found.setdefault(layer, {}).update(dict.fromkeys(of, _values(checkpoint, tensor)))
    return {
        layer: CacheScales(k=each.get("k", UNIT.k), v=each.get("v", UNIT.v))
        for layer, each in sorted(found.items())
    }


def _values(checkpoint: Checkpoint, tensor: TensorInfo) -> tuple[float, ...]:
    return tuple(map(float, floats(read_whole(checkpoint, tensor), tensor.dtype)))
