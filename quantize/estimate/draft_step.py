"""What engines do to draft for a verify step: tensors that each pass reads, for how many tokens.

Sources: vLLM 0.33 `llm_base_proposer.py`, `qwen3_dflash.py`; SGLang 0.5.23 `eagle_worker_v2.py`,
`dflash_worker_v2.py`. Both give the draft all K + 1 positions that the target verified, even those
that were not accepted: the batch keeps its shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...recipes.errors import EstimateError
from ...recipes.formats import KvCacheDtype, Precision
from ...recipes.schema import Recipe
from ..drafts.family import Draft, Row
from ..drafts.geometry import Geometry, usual_draft_tokens
from ..drafts.shared.mixture import is_expert
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from ..planning.quantization_plan import Plan
from .work import ELEMENT_BYTES, Part, Pass, Round, VerifyStep, Work, cache_works, key_value_shards

USUAL_CONTEXT = 4096
"""Positions of each sequence in the KV cache, unless the user says how many."""
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""MLA's latent projections, which every shard computes whole."""
_LOOKED_UP = ("markov_w1", "predecessor_codebook", "successor_codebook")
"""Tables from which a block reads a few rows."""
_PARTS: dict[str, Part] = {
    "attention": "attention", "kv_up": "attention", "mlp": "mlp", "fusion": "fusion",
    "head": "head", "proposal": "head", "correction": "head", "embedding": "embedding",
    "mask": "embedding", "norm": "norm", "router": "other", "indexer": "attention",
    "vocabulary_map": "other", "other": "other",
}  # fmt: skip


class Weight(NamedTuple):
    """A tensor of a draft: its bytes in memory, and the dtype in which it is multiplied."""

    row: Row
    nbytes: int
    precision: Precision
    is_fp4: bool = False

    @property
    def is_quantized(self) -> bool:
        """True if it has other bytes than its own."""
        return self.nbytes != self.row.tensor.nbytes


def plain_weights(draft: Draft) -> tuple[Weight, ...]:
    """The tensors as the draft has them."""
    return tuple(Weight(row, row.tensor.nbytes, "bf16") for row in draft.rows)


def planned_weights(plan: Plan) -> tuple[Weight, ...]:
    """The tensors as engines hold a plan's, without dropped ones; scales count with their linear.

    That is as stored, but where our plugin unpacks INT4 to FP8, a byte each, as it loads.
    """
    weights = []
    for step in plan.steps:
        if step.action == "quantize":
            recipe = plan.recipe_of(step)
            precision, is_fp4 = multiplied_as(recipe), recipe.weights.number.is_fp4
            unpacked = step.row.tensor.numel // 2 if recipe.is_for_the_plugin else 0
            weights.append(Weight(step.row, step.bytes_after + unpacked, precision, is_fp4))
        elif step.action != "drop":
            weights.append(Weight(step.row, step.bytes_after, "bf16"))
    return tuple(weights)


def multiplied_as(recipe: Recipe) -> Precision:
    """The dtype of their inputs: weight-only formats are widened to 16 bits for the product."""
    if recipe.activations is None:
        return "bf16"
    mixed = recipe.weights.number.is_fp4 and not recipe.activations.number.is_fp4
    return "mxfp4_fp8" if mixed else recipe.activations.number.unit


def usual_context(config: Mapping[str, Any]) -> int:
    """Positions per sequence by default: 4,096, or fewer by the draft's config.json."""
    section = config.get("text_config")
    text = section if isinstance(section, Mapping) else config
    limit = text.get("max_position_embeddings")
    return min(USUAL_CONTEXT, limit) if type(limit) is int and limit > 0 else USUAL_CONTEXT


def checked_num_draft_tokens(geometry: Geometry, asked: int | None) -> int:
    """K: as asked, or a chain of 3, or the whole block after its anchor."""
    limit = geometry.token_limit
    if asked is not None and limit is not None and asked > limit.tokens:
        what = f"expected at most {limit.tokens}, got {asked}: {limit.why}"
        raise EstimateError("--num-draft-tokens", what, fix="give the number that will be served")
    return usual_draft_tokens(geometry) if asked is None else asked


def draft_round(
    draft: Draft,
    weights: Sequence[Weight],
    served: VerifyStep,
    kv_cache: KvCacheDtype | None = None,
) -> Round:
    """The passes that draft for one verify step; `kv_cache` None = BF16."""
    if draft.geometry.num_modules > 1 or any(is_expert(row.canonical) for row in draft.rows):
        what = "drafts with experts, or with a module for each token, are not estimated"
        raise EstimateError(draft.checkpoint.folder, what, fix="measure it ('draftquant measure')")
    heads, tp = draft.geometry.num_attention_heads, served.tp
    if tp < 1 or heads % tp:
        what = f"expected a number of GPUs that share {heads} attention heads evenly, got {tp}"
        raise EstimateError("--tp", what, fix=f"give a divisor of {heads}")
    proposed = served.num_draft_tokens
    whole, later = proposed + 1, proposed - 1
    builder = _Passes(draft, weights, served.context, tp, kv_cache)
    features = builder.features(whole)
    if draft.geometry.block_size is not None:
        slots = whole - (draft.geometry.most_draft_tokens == draft.geometry.block_size)
        features = (*features, *builder.context_keys_values(whole))
        steps = [Pass(name="block", works=builder.body(slots, proposed, own_positions=slots))]
    elif draft.geometry.parallel:
        steps = [Pass(name="step", works=builder.body(whole + later, proposed))]
    else:
        steps = [Pass(name="first step", works=builder.body(whole, 1))]
        if later:
            steps.append(Pass(name="step", works=builder.body(1, 1), repeats=later))
    return Round(passes=(Pass(name="features", works=features), *steps))


@dataclass(frozen=True, slots=True)
class _Passes:
    draft: Draft
    weights: Sequence[Weight]
    context: int
    tp: int
    kv_cache: KvCacheDtype | None

    def features(self, tokens: int) -> tuple[Work, ...]:
        """The work that turns the target's features into the draft's first input."""
        return tuple(self._weight(w, tokens) for w in self.weights if self._makes_features(w.row))

    def context_keys_values(self, tokens: int) -> tuple[Work, ...]:
        """Keys and values of new context positions, projected apart from the block's.

        Unquantized, k and v of all layers are one matrix. Quantized, a layer's q, k and v run
        whole and q is discarded. Sources: vLLM 0.33 `qwen3_dflash.py:505-534` and `:592-616`;
        SGLang 0.5.23 `models/dflash.py:429-456` and `dflash_worker_v2.py:1000-1062`.
        """
        inputs = [w for w in self.weights if w.row.leaf in ("q_proj", "k_proj", "v_proj")]
        quantized = any(w.is_quantized for w in inputs)
        read = [w for w in inputs if quantized or w.row.leaf != "q_proj"]
        norms = [w for w in self.weights if w.row.leaf == "k_norm"]
        return tuple(self._weight(w, tokens) for w in (*read, *norms))

    def body(self, tokens: int, proposals: int, *, own_positions: int = 0) -> tuple[Work, ...]:
        """The layers over `tokens`, the head over `proposals`; `own_positions` see each other."""
        works = []
        for weight in self.weights:
            role = weight.row.role
            looked_up = role in ("embedding", "mask") or weight.row.leaf in _LOOKED_UP
            if looked_up or self._makes_features(weight.row) or weight.row.canonical == "t2d":
                continue
            if role == "vocabulary_map":
                nbytes = DTYPE_BYTES[weight.row.tensor.dtype] * proposals
                works.append(Work(part="other", sequence_bytes=nbytes))
            else:
                works.append(self._weight(weight, proposals if role == "head" else tokens))
        if all(weight.row.role != "head" for weight in self.weights):
            works.append(self._weight(_targets_head(self.draft), proposals))
        cache = cache_works(
            self.draft.geometry,
            context=self.context,
            own_positions=own_positions,
            queries=tokens,
            tp=self.tp,
            dtype=self.kv_cache,
        )
        return (*works, self._embedding_rows(tokens), *cache)

    def _makes_features(self, row: Row) -> bool:
        return row.canonical.startswith(self.draft.family.makes_features)

    def _weight(self, weight: Weight, tokens: int) -> Work:
        shards, tensor = self._shards(weight.row), weight.row.tensor
        return Work(
            part=_PARTS[weight.row.role],
            weight_bytes=weight.nbytes,
            sequence_flops=2 * tensor.numel * tokens if len(tensor.shape) == 2 else 0,
            unfolded_bytes=2 * ELEMENT_BYTES * tensor.numel if weight.is_fp4 else 0,
            precision=weight.precision,
            byte_shards=shards,
            flop_shards=shards,
        )

    def _shards(self, row: Row) -> int:
        """SGLang has fc as a plain linear, and vLLM replicates it; norms are everywhere."""
        if row.role in ("fusion", "norm") or row.leaf in _REPLICATED:
            return 1
        if self.tp > 1 and row.leaf in ("k_proj", "v_proj"):
            return key_value_shards(self.draft.geometry, self.tp)
        return self.tp

    def _embedding_rows(self, tokens: int) -> Work:
        """One row for each token, from the draft's table or the target's."""
        dtypes = (w.row.tensor.dtype for w in self.weights if w.row.role == "embedding")
        size = next((DTYPE_BYTES[dtype] for dtype in dtypes), ELEMENT_BYTES)
        return Work(
            part="embedding", sequence_bytes=tokens * size * self.draft.geometry.hidden_size
        )


def _targets_head(draft: Draft) -> Weight:
    shape = (draft.geometry.draft_vocab_size, draft.geometry.hidden_size)
    nbytes, name = ELEMENT_BYTES * shape[0] * shape[1], "lm_head.weight"
    tensor = TensorInfo(name=name, dtype="BF16", shape=shape, file="", start=0, stop=nbytes)
    return Weight(Row(tensor=tensor, canonical=name, role="head"), nbytes, "bf16")
