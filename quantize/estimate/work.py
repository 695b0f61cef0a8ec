"""What a model reads and multiplies: work by parts, passes of it, and their roofline time."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...recipes.errors import EstimateError
from ...recipes.formats import NUMBER_FORMATS, KvCacheDtype, Precision
from ..drafts.geometry import Geometry, GroupedAttention, LatentAttention
from ..gpus import Gpu

Part = Literal["attention", "mlp", "fusion", "head", "embedding", "norm", "kv_cache", "other"]
ELEMENT_BYTES = 2
"""Bytes of a 16-bit number: in a KV cache, the target's tables, or a 16-bit target."""


class VerifyStep(NamedTuple):
    """Tokens drafted per verify step (K), positions in each KV cache, GPUs, sequences at once."""

    num_draft_tokens: int
    context: int
    tp: int = 1
    concurrency: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one kernel: a linear, the cache of a layer, or rows of a table.

    Attributes:
        weight_bytes: read once for all sequences; sequence_bytes: read for each of them.
        unfolded_bytes: moved in addition where FP4 is emulated and multiplied as bf16.
    """

    part: Part
    weight_bytes: int = 0
    sequence_bytes: int = 0
    sequence_flops: int = 0
    unfolded_bytes: int = 0
    precision: Precision = "bf16"
    byte_shards: int = 1
    flop_shards: int = 1

    def nbytes(self, concurrency: int) -> int:
        """Bytes read for `concurrency` sequences by all GPUs together; shared ones count once."""
        return self.weight_bytes + concurrency * self.sequence_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run through a model, or a part of it; `repeats` times per verify step."""

    name: str
    works: tuple[Work, ...]
    repeats: int = 1

    def nbytes(self, concurrency: int, part: Part | None = None) -> int:
        """Bytes that one of its runs reads: for one part, or for all."""
        chosen = (work for work in self.works if part in (None, work.part))
        return sum(work.nbytes(concurrency) for work in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The passes between two verify steps of the target, in their order."""

    passes: tuple[Pass, ...]

    @property
    def step(self) -> Pass:
        """The pass that a longer chain repeats; for a block draft, the pass over its block."""
        return self.passes[-1]

    def nbytes(self, concurrency: int, part: Part | None = None) -> int:
        """Bytes that all passes read: for one part, or for all."""
        return sum(each.repeats * each.nbytes(concurrency, part) for each in self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs that serve, and the share of their data sheet that kernels reach, in (0, 1]."""

    gpu: Gpu
    efficiency: float

    def work_seconds(self, work: Work, concurrency: int) -> float:
        """The longer of reading and computing, limited by bandwidth and peak."""
        precision = self.gpu.computes_in(work.precision)
        peak = self.gpu.peaks[precision]
        moved = work.nbytes(concurrency)
        # Weights are widened as they are read under inputs of 16 bits alone.
        widened = self.gpu.widens_fp4 and work.precision != "mxfp4_fp8"
        if precision == "bf16" and not widened:
            moved += work.unfolded_bytes
        reading = moved / work.byte_shards / self.gpu.bandwidth
        computing = concurrency * work.sequence_flops / work.flop_shards / peak
        return max(reading, computing) / self.efficiency

    def pass_seconds(self, one: Pass, concurrency: int) -> float:
        """One run of a pass: its works, one after the other."""
        return sum(self.work_seconds(work, concurrency) for work in one.works)

    def round_seconds(self, whole: Round, concurrency: int) -> float:
        """All passes of a verify step."""
        return sum(each.repeats * self.pass_seconds(each, concurrency) for each in whole.passes)


def break_even_loss(baseline: float, candidate: float, verify: float) -> float:
    """The relative loss of acceptance length at which the candidate is as fast as the baseline.

    speed = acceptance_length / (drafting + verify), all in seconds, so speeds are equal where

        1 - loss = (candidate + verify) / (baseline + verify)

    Below zero the candidate is slower even if it loses nothing.
    """
    return (baseline - candidate) / (baseline + verify)


# The KV cache is in BF16 or FP8, which is widened as it is read; its scales are negligible.
# MLA caches one latent row per position, which all heads share and attention reads as is: engines
# fold kv_b_proj into queries and outputs.


def cache_works(
    geometry: Geometry,
    *,
    context: int,
    own_positions: int,
    queries: int,
    tp: int,
    dtype: KvCacheDtype | None,
) -> tuple[Work, ...]:
    """Attention of all layers for one sequence, one work per layer; sliding ones read a window."""
    size = ELEMENT_BYTES if dtype is None else NUMBER_FORMATS[dtype].bits // 8
    attention = geometry.attention
    if attention is None:
        what = "it is unknown how much of a KV cache this kind of draft reads"
        raise EstimateError(type(geometry).__name__, what, fix="estimate a draft of another family")
    of_layer = _latent if isinstance(attention, LatentAttention) else _grouped
    windows = map(geometry.window_of, range(geometry.num_layers))
    held = (context if window is None else min(context, window) for window in windows)
    heads = geometry.num_attention_heads
    return tuple(of_layer(attention, heads, n + own_positions, queries, tp, size) for n in held)


def key_value_shards(geometry: Geometry, tp: int) -> int:
    """GPUs that share key and value projections: at most one per head."""
    attention = geometry.attention
    return min(tp, attention.num_key_value_heads) if isinstance(attention, GroupedAttention) else tp


def _grouped(attention: Any, heads: int, positions: int, queries: int, tp: int, size: int) -> Work:
    """Bytes are keys and values of all positions; GPUs beyond the number of heads hold copies.

    FLOP are 2 for the scores and 2 for the sum, each per query, head, position and dimension.
    """
    return Work(
        part="kv_cache",
        sequence_bytes=positions * 2 * attention.num_key_value_heads * attention.head_dim * size,
        sequence_flops=4 * queries * heads * positions * attention.head_dim,
        byte_shards=min(tp, attention.num_key_value_heads),
        flop_shards=tp,
    )


def _latent(attention: Any, heads: int, positions: int, queries: int, tp: int, size: int) -> Work:
    row = attention.kv_lora_rank + attention.qk_rope_head_dim
    return Work(
        part="kv_cache",
        sequence_bytes=positions * row * size,
        sequence_flops=2 * queries * heads * positions * (row + attention.kv_lora_rank),
        flop_shards=tp,  # every GPU reads all latent rows, for its own heads
    )
