"""How vLLM 0.33.0 reads a config.json in the layout of speculators: as an ordinary one.

Source: `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs/speculators`, and
`get_config`; executed with keys left out (`tests/engines/RESULTS.md`), whose error texts these are.
Unlike the configs of ordinary drafts, this one has no defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..drafts.speculators_layout import LAYER_CONFIG
from .contract import Finding
from .misnamed import transformers_problem
from .vllm_config import INVALID

_ATTRIBUTE = "AttributeError: 'SpeculatorsConfig' object has no attribute '{}'"
_SAVE = "save the draft again with the speculators package"
_NOT_READ = {
    "eagle": "write it as an ordinary EAGLE-1 head: tensors fc. and layers.0., a Llama config",
    "mtp": "put the layer back into its target: scripts/stitch_mtp.py of speculators",
}
"""Kinds of the package that vLLM has no reading of -> what serves them."""
_EAGLE3 = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
_NEEDED = ("intermediate_size", "hidden_act", "rms_norm_eps")
_NEEDED_BY_QWEN3 = ("max_position_embeddings", "num_key_value_heads")
_BLOCK = 8
"""Tokens of a block where nothing says how many: vLLM asks the command that serves the draft."""
_DFLASH_KEYS = ("aux_hidden_state_layer_ids", "mask_token_id")

_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DSPARK_KEYS = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "block_size",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def plain_config(config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
    """The ordinary config.json as which vLLM reads one, or its error."""
    model_type = config.get("model_type")
    if model_type is None and config.get("speculators_config") is None:
        text = INVALID.format(
            "Unrecognized model in DRAFT. Should have a `model_type` key in its config.json."
        )
        return Finding("config", text, "add model_type, or speculators_config")
    if model_type not in (None, "speculators"):
        return transformers_problem(config, INVALID) or config
    kind = config.get("speculators_model_type")
    if kind not in tuple(_READ):  # of any JSON type
        if remedy := _NOT_READ.get(str(kind)):
            return Finding("config", INVALID.format("Expected one of: "), remedy)
        if isinstance(kind, str):
            return Finding("unknown", f"speculators_model_type {kind}: never executed", "try it")
        return Finding("config", INVALID.format("Expected one of: "), "add speculators_model_type")
    layers = config.get(LAYER_CONFIG)
    if not isinstance(layers, Mapping):
        return Finding("init", _ATTRIBUTE.format("vocab_size"), _SAVE)
    qwen3 = kind in ("dflash", "dflash2", "dspark") or layers.get("model_type") == "qwen3"
    needed = (*(_NEEDED_BY_QWEN3 if qwen3 else ()), *_NEEDED)
    absent = next((key for key in needed if key not in layers), None)
    own = _READ[kind](config, layers)
    if isinstance(own, Finding):
        return own
    if absent is not None:
        return Finding("init", _ATTRIBUTE.format(absent), f"add {absent!r} to {LAYER_CONFIG}")
    shared = {
        "draft_vocab_size": config.get("draft_vocab_size"),
        "quantization_config": config.get("quantization_config")
        or layers.get("quantization_config"),
    }
    if config.get("target_hidden_size") is not None:
        shared["target_hidden_size"] = config["target_hidden_size"]
    return {**layers, **shared, **own}


def _eagle3(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    model_type = layers.get("model_type", "llama")
    if model_type not in tuple(_EAGLE3):  # of any JSON type
        text = INVALID.format(f"Unsupported model_type {model_type} for Eagle3 speculator")
        return Finding("config", text, "serve a draft with layers of Llama or Qwen3")
    return {
        "architectures": [_EAGLE3[model_type]],
        "norm_before_residual": config.get("norm_before_residual", True),
        "norm_before_fc": config.get("norm_before_fc", False),
        "fc_norm": config.get("fc_norm", False),
        "norm_output": config.get("norm_output", False),
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids"),
    }


def _peagle(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    """`update_peagle`, whose names of architectures are those of EAGLE-3's classes."""
    if "mask_token_id" not in config:
        return Finding("config", "KeyError: 'mask_token_id'", "add it, as the draft was trained")
    found = _eagle3(config, layers)
    if isinstance(found, Finding):
        return found
    own = {key: value for key, value in found.items() if key not in ("fc_norm", "norm_output")}
    residual = config.get("norm_before_residual", False)
    return {**own, "norm_before_residual": residual, "pard_token": config["mask_token_id"]}


def _dflash(config: Mapping[str, Any], _layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    ids = _block_ids(config, *_DFLASH_KEYS)
    if isinstance(ids, Finding):
        return ids
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": ids,
            "causal": not config.get("sliding_window_non_causal", True),
        },
        "block_size": config.get("block_size") or _BLOCK,
    }


def _dflash2(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    plain = _dflash(config, layers)
    if isinstance(plain, Finding):
        return plain
    absent = next((key for key in _DFLASH2_KEYS if config.get(key) is None), None)
    if absent is not None:
        return Finding("init", f"KeyError: {absent!r}", f"add {absent!r}, as it was trained")
    own = {key: config[key] for key in _DFLASH2_KEYS}
    return {
        **plain,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**plain["dflash_config"], **own},
    }


def _dspark(config: Mapping[str, Any], _layers: Mapping[str, Any]) -> dict[str, Any] | Finding:
    ids = _block_ids(config, "aux_hidden_state_layer_ids")
    if isinstance(ids, Finding):
        return ids
    kept = {key: config[key] for key in _DSPARK_KEYS if config.get(key) is not None}
    anchor = config.get("sample_from_anchor", False)
    return {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": ids,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "sample_from_anchor": anchor,
        **kept,
    }


def _block_ids(config: Mapping[str, Any], *needed: str) -> list[int] | Finding:
    for key in needed:
        if key not in config:
            return Finding("config", f"KeyError: {key!r}", f"add {key!r}, as it was trained")
    ids = config["aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        text = f"TypeError: '{type(ids).__name__}' object is no list of layers"
        return Finding("config", text, "correct 'aux_hidden_state_layer_ids'")
    return [i - 1 for i in ids]


_READ: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any] | Finding]] = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "eagle3": _eagle3,
    "peagle": _peagle,
}
