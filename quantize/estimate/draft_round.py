"""A round of a draft as engines run it: which tensors each pass reads, for how many tokens.

Sources: vLLM 0.33 `llm_base_proposer.py`, `qwen3_dflash.py`; SGLang 0.5.23 `eagle_worker_v2.py`,
`dflash_worker_v2.py`. Both hand the draft all K + 1 positions that the target verified, also those
that were not accepted: the batch keeps its shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...recipes.formats import NUMBER_FORMATS, KvCacheDtype, OnlineHead, Precision
from ...recipes.schema import Recipe
from ..drafts import read_config
from ..drafts.family import Draft, Row, TensorSpec
from ..drafts.geometry import Geometry, HeadsGeometry, usual_draft_tokens
from ..errors import CheckpointError, EstimateError
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from ..quantization_plan import Plan, Step
from .passes import Passes, Weight, targets_head
from .work import Pass, Round

USUAL_CONTEXT = 4096
"""Positions of each sequence that are in the KV cache where nobody says how many."""


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
    return any(w.row.role == "head" and not w.is_quantized for w in weights)


def with_vocabulary(draft: Draft, size: int) -> Draft:
    """The draft as it would be with a head of `size` kept rows: headers and geometry alone.

    Every tensor whose spec has the dimension draft_vocab_size has so many rows; a head that was the
    target's is the draft's own, in the dtype of the draft; the maps d2t and t2d are there.

    Raises:
        EstimateError: the family takes no cut head, or the draft has no more rows than that.
    """
    held = draft.geometry.draft_vocab_size
    if not 0 < size < held:
        raise EstimateError(
            "--vocab-size",
            f"expected at least 1 and fewer than the {held:,} rows of the head, got {size:,}",
            fix="give the number of rows to keep, such as 32000",
        )
    config = {**draft.checkpoint.config, "draft_vocab_size": size}
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        raise EstimateError("--vocab-size", exc.what, fix="leave it out for this draft") from exc
    specs = draft.family.tensor_specs(geometry)
    if geometry.draft_vocab_size != size or "d2t" not in specs:
        raise EstimateError(
            "--vocab-size",
            f"drafts of {draft.family.name} have no map of a cut vocabulary",
            fix="leave it out for this draft",
        )
    rows = {row.canonical: row for row in draft.rows}
    dtypes = {"lm_head.weight": as_it_is(draft), "d2t": "I64", "t2d": "BOOL"}
    held_rows = [_resized(row, specs[row.canonical]) for row in draft.rows]
    made = [_made(name, dtype, specs[name]) for name, dtype in dtypes.items() if name not in rows]
    ordered = sorted([*held_rows, *made], key=lambda row: row.tensor.name)
    tensors = {row.tensor.name: row.tensor for row in ordered}
    return replace(
        draft,
        checkpoint=replace(draft.checkpoint, config=config, tensors=tensors),
        geometry=geometry,
        rows=tuple(ordered),
    )


def as_it_is(draft: Draft) -> str:
    """The dtype of its norms, which Medusa heads need not have: else of its first tensor."""
    norms = [row for row in draft.rows if row.role == "norm"]
    return (*norms, *draft.rows)[0].tensor.dtype


def _resized(row: Row, spec: TensorSpec) -> Row:
    shape = tuple(dim.size for dim in spec.shape)
    stop = row.tensor.start + prod(shape) * DTYPE_BYTES[row.tensor.dtype]
    file = "" if row.role == "vocabulary_map" else row.tensor.file  # other numbers than it holds
    return replace(row, tensor=replace(row.tensor, file=file, shape=shape, stop=stop))


def _made(name: str, dtype: str, spec: TensorSpec) -> Row:
    """A tensor that no file has yet."""
    shape = tuple(dim.size for dim in spec.shape)
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    tensor = TensorInfo(name=name, dtype=dtype, shape=shape, file="", start=0, stop=nbytes)
    return Row(tensor=tensor, canonical=name, role=spec.role)


def with_online_head(
    draft: Draft, weights: Sequence[Weight], dtype: OnlineHead
) -> tuple[Weight, ...]:
    """The same with a head in fewer bits, its own or a copy of the target's.

    As vLLM 0.33 makes it while it loads (`layers/quantization/online/lm_head.py`); a folder has the
    same bytes of such a head. FP8 has a float32 scale per row and multiplies in FP8; NVFP4 has an
    FP8 scale per 16 inputs and a float32 one above them, and its inputs stay in 16 bits.
    """
    own = [weight.row for weight in weights if weight.row.role == "head"]
    others = [weight for weight in weights if weight.row.role != "head"]
    return (*others, *(_online(row, dtype) for row in own or [targets_head(draft).row]))


def _online(row: Row, dtype: OnlineHead) -> Weight:
    rows, numel = row.tensor.shape[0], row.tensor.numel
    if dtype == "fp8":
        return Weight(row, numel + 4 * rows, "fp8")
    return Weight(row, numel // 2 + numel // 16 + 4, "bf16", is_fp4=True)


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
    draft: Draft,
    weights: Sequence[Weight],
    *,
    num_draft_tokens: int,
    context: int,
    tp: int,
    kv_cache: KvCacheDtype | None = None,
) -> Round:
    """The passes of one round.

    Args:
        draft: whose geometry is served.
        weights: its tensors, in whatever form.
        num_draft_tokens: K.
        context: positions in each sequence's KV cache.
        tp: tensor-parallel shards.
        kv_cache: its format; None = BF16.

    Raises:
        EstimateError: `context` or `tp` is below 1, or the heads cannot be shared by `tp` GPUs.
    """
    _check(draft, context, tp)
    whole, proposed = num_draft_tokens + 1, num_draft_tokens
    builder = Passes(draft, weights, context, tp, kv_cache)
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
