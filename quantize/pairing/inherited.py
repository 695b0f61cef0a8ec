"""What a draft inherits from its target unasked: quantization, and the KV cache's dtype.

Sources: SGLang 0.5.23 `arg_groups/serving_hook.py:685` (the value of --quantization becomes the
draft's) and `configs/model_config.py:2000` (how the draft's own declaration changes that);
vLLM 0.33 `model_executor/models/utils.py:985` (drafts with a folder of their own read their own
declaration), `engine/arg_utils.py:2297` and `v1/spec_decode/llm_base_proposer.py:1293` (the KV
cache's dtype is resolved by the target, and is the draft's too); SGLang
`mem_cache/kv_cache_dtype.py:33`; TensorRT-LLM `modeling_speculative.py` at 00679c66.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..drafts.config_reader import object_at
from ..engines.contract import EngineName
from ..engines.folder_findings import CACHE_SCALE
from ..engines.versions import ENGINES
from ..files.checkpoint import announced_mtp_layers, mtp_layers
from ..stored.stored_tables import HEAD
from .pair import Pair


def cache_in(pair: Pair, engine: EngineName) -> str | None:
    """The quantized dtype that the draft's KV cache would inherit; None = it keeps its own."""
    given = pair.args.cache_dtype
    if given is not None:
        return None if given in ("bf16", "bfloat16", "float16") else given
    return None if engine == "sglang" else pair.target.cache_dtype


def launch_cache(pair: Pair, engine: EngineName) -> str | None:
    """The launch line's dtype of the draft's KV cache: as asked, or what blocks the target's.

    An MTP layer shares the target's layout of the cache, so the line says nothing about it.
    """
    if pair.args.draft_cache_dtype is not None:
        return pair.args.draft_cache_dtype
    stopped = cache_in(pair, engine) is not None and not pair.is_mtp and not has_scales(pair)
    return ENGINES[engine].own_cache[0] if stopped else None


def facts_in(pair: Pair, engine: EngineName) -> dict[str, Any]:
    """Facts on the KV cache of one engine.

    A cache whose scales the draft does not store has scales of 1.
    """
    inherited = None if has_scales(pair) else cache_in(pair, engine)
    origin = "--kv-cache-dtype" if pair.args.cache_dtype else "its quantization_config"
    none = ", and the draft stores no scales, so engines take 1 for both"
    scales = none if inherited and inherited.startswith("fp8") else ""
    keeps = None if pair.is_mtp else ENGINES[engine].own_cache[1]
    line = f"the launch line says {keeps}, which keeps the draft's in floats; or " if keeps else ""
    return {"cache": inherited, "cache_said": origin, "scales": scales, "keeps_cache": line}


def has_scales(pair: Pair) -> bool:
    """Whether the draft stores scales of its KV cache."""
    return any(CACHE_SCALE.search(f".{name}") for name in pair.draft.tensors)


# ---- Embedding and head that a draft borrows, where the target stores them quantized
# Sources: vLLM 0.33 passes on the module with its own kernel (`v1/worker/gpu/spec_decode/eagle/
# utils.py:104`, `dflash/utils.py:62`, `dspark/utils.py:134`). SGLang 0.5.23 puts the target's
# `weight` into the draft's head (`eagle_worker_v2.py:337`; executed for EAGLE-1 with 4-bit values,
# whose error this is), which keeps the kernel of floats but for Qwen3.5's and Nemotron's MTP layers
# (`set_lm_head_from_target`); DFlash, DFlash2 and DSpark project through it with its own kernel
# (`models/dflash.py:106`, `models/dspark.py:128`).


def facts(pair: Pair) -> dict[str, Any]:
    """Facts on quantization, a borrowed head, a rotated stream and MTP.

    A head is borrowed where the draft stores none, or engines build none for it. With
    `transformers_mtp` vLLM builds the layers from transformers' classes, like the target's.
    """
    target, traits = pair.target, pair.family.engine_traits
    head = target.is_stored_quantized("lm_head")
    stored = {pair.family.canonical_name(name) for name in pair.draft.tensors}
    promised = announced_mtp_layers(target.text)
    words = " ".join(pair.args.words).replace("--model-impl=", "--model-impl ")
    by_transformers = pair.is_mtp and "--model-impl transformers" in words
    return {
        "inherited_method": None if pair.args.quantization == "unquant" else pair.args.quantization,
        "declared": None if pair.is_mtp else target.quantization,
        "is_declared_by_target": pair.is_mtp and not pair.is_inside and bool(target.declaration),
        "borrows_head": not pair.is_whole_model
        and (HEAD not in stored or traits.sglang.shares_tables),
        "head_is_unread": head is None,
        "head_is_quantized": bool(head),
        "drafts_blocks": traits.drafts_blocks,
        "dropped_layers": 0 if mtp_layers(target.names) or not target.names else promised,
        "rotated_by": None if pair.is_whole_model else rotated_by(target.declaration),
        "transformers_mtp": target.text.get("num_mtp_layers") if by_transformers else None,
    }


# ---- A residual stream that the quantizer of the target rotated, which is what a draft reads
# SpinQuant's R1 and QuaRot multiply every layer's output by an orthogonal matrix, and fold the
# inverse into its readers: the target answers as before, but its hidden states and its embedding
# are rotated. A draft of the original target reads noise: vllm-ascend issues 5974 and 6445, and
# PR 6914, which folds the rotation into fc. vLLM 0.33 and SGLang 0.5.23 fold nothing. Rotations
# within a layer (R2 to R4, QuIP) do not change the stream.

_EMBEDDING = ("embed", "wte")
"""Names of an embedding in the targets of a transform: `model.embed_tokens`, `re:.*wte$`."""


def rotated_by(declaration: Mapping[str, Any] | None) -> str | None:
    """The part of a target's quantization_config that says that its residual stream is rotated.

    Two toolkits write it: compressed-tensors into transform_config (`transform_args.py` of 0.20),
    Quark into algo_config (`RotationConfig` of 0.13). None = there is none.
    """
    return next(_rotations(declaration or {}), None)


def _rotations(declaration: Mapping[str, Any]) -> Iterator[str]:
    """A transform that is folded into the embedding's output reaches every later layer.

    Quark folds R1 into the weights unless `online_r1_rotation`; QuaRot is its older name.
    """
    transforms = object_at(object_at(declaration, "transform_config"), "config_groups")
    for name in transforms:
        applied = object_at(transforms, name).get("apply")
        for place in _objects(applied if isinstance(applied, list) else []):
            is_folded = place.get("location") in ("weight_output", "output")
            if is_folded and any(w in str(place.get("targets")).lower() for w in _EMBEDDING):
                yield f"transform {name} of its transform_config"
    algorithms = declaration.get("algo_config")
    for each in _objects(algorithms if isinstance(algorithms, list) else [algorithms]):
        is_rotated = each.get("name") in ("rotation", "quarot") and each.get("r1", True)
        if is_rotated and not each.get("online_r1_rotation"):
            yield f"{each['name']} with R1 of its algo_config"


def _objects(values: Iterable[object]) -> Iterator[Mapping[str, Any]]:
    return (value for value in values if isinstance(value, Mapping))
