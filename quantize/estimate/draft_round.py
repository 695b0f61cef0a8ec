"""A round of a draft as engines run it: which tensors each pass reads, for how many tokens.

Sources: vLLM 0.33 `llm_base_proposer.py`, `qwen3_dflash.py`; SGLang 0.5.23 `eagle_worker_v2.py`,
`dflash_worker_v2.py`. Both hand the draft all K + 1 positions that the target verified, also those
that were not accepted: the batch keeps its shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...recipes.formats import NUMBER_FORMATS, Precision
from ...recipes.schema import Recipe
from ..drafts.family import Draft, Row
from ..drafts.geometry import Geometry, HeadsGeometry, usual_draft_tokens
from ..errors import EstimateError
from ..files.safetensors_header import DTYPE_BYTES
from ..quantization_plan import Plan, Step
from .attention_cache import cache_works, key_value_shards
from .work import ELEMENT_BYTES, Part, Pass, Round, Work

USUAL_CONTEXT = 4096
"""Positions of each sequence that are in the KV cache where nobody says how many."""
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


def part_of(row: Row) -> Part:
    """The part that a tensor counts to."""
    return _PARTS[row.role]


def plain_weights(draft: Draft) -> tuple[Weight, ...]:
    """The tensors as the draft has them."""
    return tuple(Weight(row, row.tensor.nbytes, "bf16") for row in draft.rows)


def planned_weights(plan: Plan) -> tuple[Weight, ...]:
    """The tensors as a plan stores them; scales and zero points count to their linear.

    What it drops is the target's, as in a draft that never had it.
    """
    return tuple(_planned(plan, step) for step in plan.steps if step.action != "drop")


def _planned(plan: Plan, step: Step) -> Weight:
    if step.action != "quantize":
        return Weight(step.row, step.bytes_after, "bf16")
    recipe = plan.recipe_of(step)
    is_fp4 = NUMBER_FORMATS[recipe.weights.dtype].is_fp4
    return Weight(step.row, step.bytes_after, multiplied_as(recipe), is_fp4)


def multiplied_as(recipe: Recipe) -> Precision:
    """What quantized linears are multiplied as: the dtype of their inputs.

    Weights alone in fewer bits are widened on the way into a 16-bit multiplication.
    """
    return NUMBER_FORMATS[recipe.activations.dtype].unit if recipe.activations else "bf16"


def has_plain_head(weights: Iterable[Weight]) -> bool:
    """Whether the draft has a head of its own, in floats."""
    return any(w.row.role == "head" and w.nbytes == w.row.tensor.nbytes for w in weights)


def with_fp8_head(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The same with the draft's own head in FP8, one float32 scale per row."""
    return tuple(
        Weight(w.row, w.row.tensor.numel + 4 * w.row.tensor.shape[0], "fp8")
        if w.row.role == "head"
        else w
        for w in weights
    )


def usual_context(configs: Sequence[Mapping[str, Any]]) -> int:
    """Positions per sequence where nobody says them: 4,096, or what the models can hold.

    Args:
        configs: config.json of the draft and, where it is given, of the target; an engine serves
            no more positions than the lesser of the two says (vLLM 0.33:
            `_maybe_override_draft_max_model_len`).
    """
    limits = [_positions(config) for config in configs]
    return min([USUAL_CONTEXT, *(limit for limit in limits if limit is not None)])


def _positions(config: Mapping[str, Any]) -> int | None:
    section = config.get("text_config")
    text = section if isinstance(section, Mapping) else config
    found = text.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else None


def checked_num_draft_tokens(geometry: Geometry, asked: int | None) -> int:
    """K: as asked, else a chain of 3 or the whole block behind its anchor.

    Raises:
        EstimateError: below 1, or more than the block holds.
    """
    most = geometry.most_draft_tokens
    if asked is None:
        return usual_draft_tokens(geometry)
    if asked < 1 or (most is not None and asked > most):
        size = geometry.block_size
        why = f"it has {most} heads" if size is None else f"blocks hold {size} tokens"
        limit = "" if most is None else f" and at most {most}, as {why}"
        raise EstimateError(
            "--num-draft-tokens",
            f"expected at least 1{limit}, got {asked}",
            fix="give the number that will be served",
        )
    return asked


def draft_round(
    draft: Draft, weights: Sequence[Weight], *, num_draft_tokens: int, context: int, tp: int
) -> Round:
    """The passes of one round.

    Args:
        draft: whose geometry is served.
        weights: its tensors, in whatever form.
        num_draft_tokens: K.
        context: positions in each sequence's KV cache.
        tp: tensor-parallel shards.

    Raises:
        EstimateError: `context` or `tp` is below 1, or the heads cannot be shared by `tp` GPUs.
    """
    _check(draft, context, tp)
    whole, proposed = num_draft_tokens + 1, num_draft_tokens
    builder = _Passes(draft, weights, context, tp)
    if isinstance(draft.geometry, HeadsGeometry):
        return Round(passes=(Pass(name="heads", works=builder.heads(draft.geometry)),))
    if draft.geometry.block_size is not None:
        slots = whole - (draft.geometry.most_draft_tokens == draft.geometry.block_size)
        context_works = (*builder.features(whole), *builder.context_keys_values(whole))
        return Round(
            passes=(
                Pass(name="features", works=context_works),
                Pass(name="block", works=builder.body(slots, proposed, own_positions=slots)),
            )
        )
    later = num_draft_tokens - 1
    if draft.geometry.parallel:
        return Round(
            passes=(
                Pass(name="features", works=builder.features(whole)),
                Pass(name="step", works=builder.body(whole + later, proposed)),
            )
        )
    passes = [
        Pass(name="features", works=builder.features(whole)),
        Pass(name="first step", works=builder.body(whole, 1)),
        Pass(name="step", works=builder.body(1, 1), repeats=later),
    ]
    return Round(passes=tuple(passes if later else passes[:-1]))


class _Passes:
    """Makes the works of passes; tokens and proposals are those of one sequence."""

    def __init__(self, draft: Draft, weights: Sequence[Weight], context: int, tp: int) -> None:
        self.draft, self.weights, self.context, self.tp = draft, weights, context, tp
        self.shared = 1 if tp == 1 else key_value_shards(draft.geometry, tp)

    def features(self, tokens: int) -> tuple[Work, ...]:
        """What makes the draft's first input of the target's features."""
        return tuple(self._weight(w, tokens) for w in self.weights if self._makes_features(w.row))

    def context_keys_values(self, tokens: int) -> tuple[Work, ...]:
        """Keys and values of new context positions, projected apart from the block's."""
        of = ("k_proj", "v_proj", "k_norm")
        return tuple(self._weight(w, tokens) for w in self.weights if _leaf(w.row) in of)

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
            *self._shared_head(proposals),
            self._embedding_rows(tokens),
            *cache_works(
                self.draft.geometry,
                context=self.context,
                own_positions=own_positions,
                queries=tokens,
                tp=self.tp,
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

    def _shared_head(self, proposals: int) -> list[Work]:
        """The target's head, where the draft has none."""
        if any(weight.row.role == "head" for weight in self.weights):
            return []
        g = self.draft.geometry
        numel = g.draft_vocab_size * g.hidden_size
        return [
            Work(
                part="head",
                weight_bytes=ELEMENT_BYTES * numel,
                sequence_flops=2 * numel * proposals,
                byte_shards=self.tp,
                flop_shards=self.tp,
            )
        ]

    def _embedding_rows(self, tokens: int) -> Work:
        """One row for each token, of the draft's table or of the target's."""
        own = (w.row.tensor.dtype for w in self.weights if w.row.role == "embedding")
        size = next((DTYPE_BYTES[dtype] for dtype in own), ELEMENT_BYTES)
        return Work(
            part="embedding", sequence_bytes=tokens * size * self.draft.geometry.hidden_size
        )


def _leaf(row: Row) -> str:
    return row.canonical.removesuffix(".weight").rpartition(".")[2]


def _check(draft: Draft, context: int, tp: int) -> None:
    if context < 1:
        raise EstimateError(
            "--context", f"expected at least 1, got {context}", fix="give positions per sequence"
        )
    heads = draft.geometry.num_attention_heads
    if tp < 1 or heads % tp:
        raise EstimateError(
            "--tp",
            f"expected a number of GPUs that share {heads} attention heads evenly, got {tp}",
            fix=f"give a divisor of {heads}",
        )
