"""How many positions are served, and what engines do where the draft is made for fewer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engines.contract import EngineName
from .pair import Pair, PairFinding
from .target import Rotation

_FLAGS: Mapping[EngineName, str] = {"vllm": "--max-model-len", "sglang": "--context-length"}
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"


def served_length(pair: Pair, engine: EngineName) -> int | None:
    """Positions that an engine serves; None = neither the line nor the target's config says it."""
    if pair.args.context is not None:
        return pair.args.context
    return _derived(pair.target.rotation, engine)


def is_too_short(pair: Pair, engine: EngineName) -> bool:
    """Whether the draft is made for fewer positions than are served."""
    served, own = served_length(pair, engine), _derived(pair.rotation, engine)
    return not pair.is_inside and served is not None and own is not None and own < served


def beyond_target(pair: Pair) -> Iterator[PairFinding]:
    """More positions than the target is made for.

    vLLM 0.33 `config/model.py:2650`; SGLang 0.5.23 `configs/model_config.py:1295`.
    """
    asked = pair.args.context
    for engine, flag in _FLAGS.items():
        made = _derived(pair.target.rotation, engine)
        if asked is not None and made is not None and asked > made:
            yield PairFinding(
                "refused",
                "context",
                f"{flag} {asked} is more than the {made:,} positions of the target itself, and the"
                " engine ends with an error",
                f"serve at most {made}",
                engine,
            )


def lengths(pair: Pair) -> Iterator[PairFinding]:
    """A draft of fewer positions than are served.

    Sources: vLLM 0.33 `config/speculative.py:1807`, `config/vllm.py:3025` and, of its V1 runner,
    `v1/worker/gpu_model_runner.py:678,4266`; SGLang 0.5.23
    `configs/model_config.py:1291`, for whose draft `eagle_worker_v2.py:229` and
    `draft_worker_common.py:100` ask for the target's length.
    """
    rotation = pair.rotation
    if is_too_short(pair, "vllm"):
        yield _in_vllm(pair, rotation, served_length(pair, "vllm"))
    if is_too_short(pair, "sglang"):
        yield _in_sglang(rotation, served_length(pair, "sglang"))
    if is_too_short(pair, "tensorrt-llm"):
        text = (
            f"the draft is made for {rotation.positions:,} positions, fewer than are served; what"
            " TensorRT-LLM does then was not read"
        )
        yield PairFinding("note", "context", text, "serve fewer: --max_seq_len", "tensorrt-llm")


def _in_vllm(pair: Pair, rotation: Rotation, served: int | None) -> PairFinding:
    made = f"the draft is made for {rotation.in_vllm:,} positions and {served:,} are served"
    if rotation.only_sizes_a_table and not pair.is_whole_model:
        return PairFinding(
            "note",
            "context",
            f"{made}: vLLM enlarges the draft's table of angles, so nothing breaks, and the draft"
            " proposes at positions that it was not trained on; the V1 model runner proposes"
            " nothing beyond the draft's",
            "measure acceptance at your lengths, or serve fewer: --max-model-len",
            "vllm",
        )
    why = (
        "a language model keeps its own length"
        if pair.is_whole_model
        else (f"angles of {rotation.kind} scaling depend on the length")
    )
    return PairFinding(
        "warning",
        "context",
        f"{made}: vLLM serves {rotation.in_vllm:,} positions of the target too ({why}), and says"
        " so in a warning of its log alone; its V1 model runner serves all, and proposes nothing"
        " beyond the draft's",
        "take a draft that is made for that length",
        "vllm",
    )


def _in_sglang(rotation: Rotation, served: int | None) -> PairFinding:
    error = (
        f"ValueError: Warning: Target model's context_length ({served}) is greater than the derived"
        f" context_length ({rotation.in_sglang})."
    )
    made = f"the draft is made for {rotation.in_sglang:,} positions and {served:,} are served"
    if rotation.only_sizes_a_table:
        return PairFinding(
            "warning",
            "context",
            f"{made}: SGLang ends with an error, unless {LONGER} is set [{error}]",
            "the launch line sets it: these angles do not depend on the length; or serve fewer:"
            f" --context-length {rotation.in_sglang}",
            "sglang",
        )
    return PairFinding(
        "refused",
        "context",
        f"{made}, and SGLang ends with an error [{error}]",
        f"serve fewer: --context-length {rotation.in_sglang}; with {LONGER} it starts, and angles"
        f" of {rotation.kind} scaling are then others than the draft was trained with",
        "sglang",
    )


def rope(pair: Pair) -> Iterator[PairFinding]:
    """Each model rotates by its own config in every engine: a difference is worth a sentence."""
    own, theirs = pair.rotation, pair.target.rotation
    if pair.geometry.rope is None or pair.is_inside or own.in_words == theirs.in_words:
        return
    yield PairFinding(
        "note",
        "rope",
        f"the draft rotates positions with {own.in_words}, its target with {theirs.in_words}: each"
        " engine takes the draft's own, so these must be what the draft was trained with",
        "compare with the trainer's config",
    )


def overrides(pair: Pair) -> Iterator[PairFinding]:
    """SGLang's overrides of config.json reach the draft too.

    Sources: SGLang 0.5.23 `configs/model_config.py:962` gives both models
    `json_model_override_args`; vLLM 0.33 keeps a dictionary for the target alone
    (`config/speculative.py:1183`).
    """
    if pair.args.overrides:
        keys = ", ".join(pair.args.overrides)
        yield PairFinding(
            "warning",
            "overrides",
            f"--json-model-override-args writes {keys} into the draft's config as well",
            "write the change into the target's config.json instead",
            "sglang",
        )


def _derived(rotation: Rotation, engine: EngineName) -> int | None:
    return {
        "vllm": rotation.in_vllm,
        "sglang": rotation.in_sglang,
        "tensorrt-llm": rotation.positions,
    }[engine]


# ---- Tensor-parallel sizes that a draft and its target both allow
#
# Engines divide query heads evenly, divide or repeat heads of keys and values, and divide the
# columns of the MLP and the rows of embedding and head, which are padded to multiples of 64.
# Source: vLLM 0.33 `config/model.py:1557`, `QKVParallelLinear`, `VocabParallelEmbedding`; SGLang
# 0.5.23 has the same layers. The draft is split as the target is: vLLM takes no other
# `draft_tensor_parallel_size` than 1 and the target's (`config/speculative.py:1849`), the others
# have
# no such option.

MOST = 16
_PADDED_TO = 64


def sizes_of_both(pair: Pair) -> tuple[int, ...]:
    """Sizes up to 16 that divide both."""
    configs = [pair.target.text, *([] if pair.is_inside else [pair.config])]
    return tuple(tp for tp in range(1, MOST + 1) if all(_divides(tp, c) for c in configs))


def tensor_parallel(pair: Pair) -> Iterator[PairFinding]:
    """A size that one of the two does not allow."""
    tp = pair.tp
    allowed = sizes_of_both(pair)
    if tp in allowed or tp > MOST:
        return
    whose = [
        f"the {name}'s {problem}"
        for name, config in (("target", pair.target.text), ("draft", pair.config))
        if (problem := _problem(tp, config)) is not None
    ]
    text = f"{' and '.join(whose)} cannot be split over {tp} GPUs"
    yield PairFinding("refused", "tensor-parallel", text, f"use one of {_listed(allowed)} GPUs")


def _divides(tp: int, config: Mapping[str, Any]) -> bool:
    return _problem(tp, config) is None


def _problem(tp: int, config: Mapping[str, Any]) -> str | None:
    """What of a config cannot be divided; keys that are absent are no obstacle."""
    heads, few = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and heads % tp:
        return f"{heads} attention heads"
    if type(few) is int and few > 0 and few % tp and tp % few and "kv_lora_rank" not in config:
        return f"{few} heads of keys and values"
    for key in ("intermediate_size", "moe_intermediate_size"):
        width = config.get(key)
        if type(width) is int and width % tp:
            return f"{key} of {width}"
    vocab = config.get("vocab_size")
    if type(vocab) is int and -(-vocab // _PADDED_TO) * _PADDED_TO % tp:
        return f"vocabulary of {vocab}, padded to a multiple of {_PADDED_TO},"
    return None


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
