"""The KV cache of a draft: what attention reads of it, and what it computes on it.

In BF16 or FP8, which is widened as it is read; its scales are nothing beside it. MLA keeps one
latent row per position, which all heads share and attention reads as it is: engines fold kv_b_proj
into queries and outputs.
"""

from dataclasses import replace

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
        geometry: of the draft.
        context: positions in the cache; a sliding layer reads its window of them.
        own_positions: positions of the pass itself that are read besides.
        queries: positions that attend.
        tp: tensor-parallel shards.
        dtype: of the cache; None = BF16.

    Raises:
        EstimateError: this family's cache is not known.
    """
    if isinstance(geometry, LatentAttention):
        latent = _latent(geometry, context + own_positions, queries, tp)
        return (_narrowed(latent, dtype),) * geometry.num_layers
    heads = _grouped(geometry)
    return tuple(
        _narrowed(
            grouped_work(
                positions=min(context, heads.window_of(layer) or context) + own_positions,
                queries=queries,
                heads=heads.num_attention_heads,
                key_value_heads=heads.num_key_value_heads,
                head_dim=heads.head_dim,
                tp=tp,
            ),
            dtype,
        )
        for layer in range(heads.num_layers)
    )


def grouped_work(
    *, positions: int, queries: int, heads: int, key_value_heads: int, head_dim: int, tp: int
) -> Work:
    """Attention of one layer whose query heads share key and value heads, for one sequence.

    Bytes are keys and values of all positions; FLOP are 2 for the scores and 2 for the sum, each
    per query, head, position and dimension. GPUs beyond the key heads hold copies of them.
    """
    return Work(
        part="kv_cache",
        sequence_bytes=positions * 2 * key_value_heads * head_dim * ELEMENT_BYTES,
        sequence_flops=4 * queries * heads * positions * head_dim,
        byte_shards=min(tp, key_value_heads),
        flop_shards=tp,
    )


def key_value_shards(geometry: Geometry, tp: int) -> int:
    """GPUs that share key and value projections: no more than there are heads of them."""
    if isinstance(geometry, LatentAttention) or geometry.num_attention_heads == 0:
        return tp
    return min(tp, _grouped(geometry).num_key_value_heads)


def _narrowed(work: Work, dtype: KvCacheDtype | None) -> Work:
    """The same of a cache of this format instead of 16 bits."""
    if dtype is None:
        return work
    bits = NUMBER_FORMATS[dtype].bits
    return replace(work, sequence_bytes=work.sequence_bytes * bits // (8 * ELEMENT_BYTES))


def _latent(g: LatentAttention, positions: int, queries: int, tp: int) -> Work:
    row = g.kv_lora_rank + g.qk_rope_head_dim
    return Work(
        part="kv_cache",
        sequence_bytes=positions * row * ELEMENT_BYTES,
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
