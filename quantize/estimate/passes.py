"""The passes of a round: which tensors each of them reads, and for how many tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...recipes.formats import KvCacheDtype, Precision
from ..drafts.family import Draft, Row
from ..drafts.geometry import HeadsGeometry
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from .attention_cache import cache_works, key_value_shards
from .work import ELEMENT_BYTES, Part, Work

_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Latent projections, which every shard computes whole."""
_LOOKED_UP = ("markov_w1", "predecessor_codebook", "successor_codebook")
"""Tables of which a block reads a few rows."""
_PARTS: dict[str, Part] = {
    "attention": "attention",
    "kv_up": "attention",
    "mlp": "mlp",
    "fusion": "fusion",
    "head": "head",
    "embedding": "embedding",
    "mask": "embedding",
    "proposal": "head",
    "router": "other",
    "norm": "norm",
    "vocabulary_map": "other",
}


class Weight(NamedTuple):
    """A tensor of a draft: the bytes that stand for it, and what its inputs are multiplied as."""

    row: Row
    nbytes: int
    precision: Precision
    is_fp4: bool = False

    @property
    def is_quantized(self) -> bool:
        """Other bytes stand for it than its own."""
        return self.nbytes != self.row.tensor.nbytes


def part_of(row: Row) -> Part:
    """The part that a tensor counts to."""
    return _PARTS[row.role]


def targets_head(draft: Draft) -> Weight:
    """The target's head, which a draft that has none reads."""
    g = draft.geometry
    shape = (g.draft_vocab_size, g.hidden_size)
    nbytes = ELEMENT_BYTES * g.draft_vocab_size * g.hidden_size
    tensor = TensorInfo(
        name="lm_head.weight", dtype="BF16", shape=shape, file="", start=0, stop=nbytes
    )
    return Weight(Row(tensor=tensor, canonical=tensor.name, role="head"), nbytes, "bf16")


class Passes:
    """Makes the works of passes; tokens and proposals are those of one sequence."""

    def __init__(
        self,
        draft: Draft,
        weights: Sequence[Weight],
        context: int,
        tp: int,
        kv_cache: KvCacheDtype | None,
    ) -> None:
        self.draft, self.weights, self.context, self.tp = draft, weights, context, tp
        self.kv_cache = kv_cache
        self.shared = 1 if tp == 1 else key_value_shards(draft.geometry, tp)

    def features(self, tokens: int) -> tuple[Work, ...]:
        """What makes the draft's first input of the target's features."""
        return tuple(self._weight(w, tokens) for w in self.weights if self._makes_features(w.row))

    def context_keys_values(self, tokens: int) -> tuple[Work, ...]:
        """Keys and values of new context positions, projected apart from the block's.

        In floats, k and v of all layers are one matrix. Quantized, a layer's q, k and v are run
        whole and q is thrown away: a kernel for each layer instead of one, and another that puts
        them together. Sources: vLLM 0.33
        `qwen3_dflash.py:505-534` and `:592-616`; SGLang 0.5.23 `models/dflash.py:429-456` and
        `dflash_worker_v2.py:1000-1062`, which norms, rotates and writes layer by layer besides.
        """
        inputs = [w for w in self.weights if _leaf(w.row) in ("q_proj", "k_proj", "v_proj")]
        quantized = [w for w in inputs if w.is_quantized]
        read = [w for w in inputs if quantized or _leaf(w.row) != "q_proj"]
        norms = [w for w in self.weights if _leaf(w.row) == "k_norm"]
        layers = sum(_leaf(w.row) == "q_proj" for w in quantized)
        apart = (Work(part="attention", launches=layers),) if quantized else ()
        return (*(self._weight(w, tokens) for w in (*read, *norms)), *apart)

    def heads(self, geometry: HeadsGeometry) -> tuple[Work, ...]:
        """All heads over one state, however many tokens are asked for.

        Source: vLLM 0.32 `v1/spec_decode/medusa.py:40-55` and `models/medusa.py:21-31`, whose
        blocks are plain linears, whole on every GPU.
        """
        proposals = geometry.num_heads if geometry.shared_head else 1
        heads = [w for w in self.weights if w.row.role == "head"]
        blocks = [w for w in self.weights if w.row.role in ("mlp", "norm")]
        return (
            *(replace(self._weight(w, 1), byte_shards=1, flop_shards=1) for w in blocks),
            *(self._weight(w, proposals) for w in heads),
        )

    def body(self, tokens: int, proposals: int, *, own_positions: int = 0) -> tuple[Work, ...]:
        """The layers over `tokens`, the head over `proposals`; `own_positions` see each other."""
        works = []
        own_head = any(weight.row.role == "head" for weight in self.weights)
        shared = [] if own_head else [targets_head(self.draft)]
        for weight in self.weights:
            if self._makes_features(weight.row) or weight.row.canonical == "t2d":
                continue
            role = weight.row.role
            if role in ("embedding", "mask") or _leaf(weight.row) in _LOOKED_UP:
                continue
            if role == "vocabulary_map":
                nbytes = DTYPE_BYTES[weight.row.tensor.dtype] * proposals
                works.append(Work(part="other", sequence_bytes=nbytes))
            else:
                works.append(self._weight(weight, proposals if role == "head" else tokens))
        return (
            *works,
            *(self._weight(weight, proposals) for weight in shared),
            self._embedding_rows(tokens),
            *cache_works(
                self.draft.geometry,
                context=self.context,
                own_positions=own_positions,
                queries=tokens,
                tp=self.tp,
                dtype=self.kv_cache,
            ),
        )

    def _makes_features(self, row: Row) -> bool:
        return row.canonical.startswith(self.draft.family.makes_features)

    def _weight(self, weight: Weight, tokens: int) -> Work:
        shards = self._shards(weight.row)
        numel = weight.row.tensor.numel
        return Work(
            part=part_of(weight.row),
            weight_bytes=weight.nbytes,
            sequence_flops=2 * numel * tokens if len(weight.row.tensor.shape) == 2 else 0,
            unfolded_bytes=2 * ELEMENT_BYTES * numel if weight.is_fp4 else 0,
            precision=weight.precision,
            byte_shards=shards,
            flop_shards=shards,
        )

    def _shards(self, row: Row) -> int:
        """SGLang holds fc as a plain linear, and vLLM replicates it; norms are everywhere."""
        if row.role in ("fusion", "norm") or _leaf(row) in _REPLICATED:
            return 1
        return self.shared if _leaf(row) in ("k_proj", "v_proj") else self.tp

    def _embedding_rows(self, tokens: int) -> Work:
        """One row for each token, of the draft's table or of the target's."""
        own = (w.row.tensor.dtype for w in self.weights if w.row.role == "embedding")
        size = next((DTYPE_BYTES[dtype] for dtype in own), ELEMENT_BYTES)
        return Work(
            part="embedding", sequence_bytes=tokens * size * self.draft.geometry.hidden_size
        )


def _leaf(row: Row) -> str:
    return row.canonical.removesuffix(".weight").rpartition(".")[2]
