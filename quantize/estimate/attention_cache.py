"""The KV cache of a draft: what attention reads of it, and what it computes on it.

In BF16 or FP8, which is widened as it is read; its scales are nothing beside it. MLA keeps one
latent row per position, which all heads share and attention reads as it is: engines fold kv_b_proj
into queries and outputs.
"""

from ...recipes.formats import NUMBER_FORMATS, KvCacheDtype
from ..drafts.geometry import Geometry, GroupedAttention, LatentAttention
from ..errors import EstimateError
from .work import ELEMENT_BYTES, Work


def cache_works(
    geometry: Geometry,
    *,
    context: int,
    own_positions: int,
    queries: int,
    tp: int,
    dtype: KvCacheDtype | None = None,
) -> tuple[Work, ...]:
    """Attention of all layers for one sequence, a work per layer.

    Args:
        context: positions in the cache; a sliding layer reads its window of them.
        dtype: of the cache; None = BF16.

    Raises:
        EstimateError: this family's cache is not known.
    """
    size = ELEMENT_BYTES if dtype is None else NUMBER_FORMATS[dtype].bits // 8
    if isinstance(geometry, LatentAttention):
        latent = _latent(geometry, context + own_positions, queries, tp, size)
        return (latent,) * geometry.num_layers
    heads = _grouped(geometry)
    held = (min(context, heads.window_of(i) or context) for i in range(heads.num_layers))
    return tuple(_layer(heads, n + own_positions, queries, tp, size) for n in held)


def key_value_shards(geometry: Geometry, tp: int) -> int:
    """GPUs that share key and value projections: no more than there are heads of them."""
    if isinstance(geometry, LatentAttention) or geometry.num_attention_heads == 0:
        return tp
    return min(tp, _grouped(geometry).num_key_value_heads)


def _layer(g: GroupedAttention, positions: int, queries: int, tp: int, size: int) -> Work:
    """Bytes are keys and values of all positions, whose heads GPUs beyond them hold copies of.

    FLOP are 2 for the scores and 2 for the sum, each per query, head, position and dimension.
    """
    return Work(
        part="kv_cache",
        sequence_bytes=positions * 2 * g.num_key_value_heads * g.head_dim * size,
        sequence_flops=4 * queries * g.num_attention_heads * positions * g.head_dim,
        byte_shards=min(tp, g.num_key_value_heads),
        flop_shards=tp,
    )


def _latent(g: LatentAttention, positions: int, queries: int, tp: int, size: int) -> Work:
    row = g.kv_lora_rank + g.qk_rope_head_dim
    return Work(
        part="kv_cache",
        sequence_bytes=positions * row * size,
        sequence_flops=2 * queries * g.num_attention_heads * positions * (row + g.kv_lora_rank),
        flop_shards=tp,  # every GPU reads all latent rows, for its own heads
    )


def _grouped(geometry: Geometry) -> GroupedAttention:
    if isinstance(geometry, GroupedAttention):
        return geometry
    raise EstimateError(
        type(geometry).__name__,
        "it is unknown how much of a KV cache this kind of draft reads",
        fix="estimate a draft of another family",
    )
