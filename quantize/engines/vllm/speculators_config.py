"""How vLLM 0.33.0 reads a config.json in the layout of speculators: as an ordinary one.

Source: `SpeculatorsConfig` and `algos.py` of `vllm/transformers_utils/configs/speculators`, and
`get_config`; executed with keys left out (`tests/engines/RESULTS.md`), whose error texts these are.
Unlike the configs of ordinary drafts, this one has no defaults.
"""

from collections.abc import Mapping
from typing import Any

from ...drafts.engine_traits import INVALID, Finding
from ...drafts.speculators_layout import LAYER_CONFIG
from ..config_rules import OF_LAYERS, as_class_reads, draft_traits
from ..engine import TRAITS
from .config import rewritten

_ATTRIBUTE = "AttributeError: 'SpeculatorsConfig' object has no attribute '{}'"
_SAVE = "save the draft again with the speculators package"
_NOT_READ = {
    "mtp": "put the layer back into its target: scripts/stitch_mtp.py of speculators",
}
"""Kinds of the package that vLLM has no reading of -> what serves them."""
_NEEDED = ("intermediate_size", "hidden_act", "rms_norm_eps")
_NEEDED_BY_QWEN3 = ("max_position_embeddings", "num_key_value_heads")
_READ = {kind: how for traits in TRAITS for kind, how in traits.vllm.speculators.items()}


def plain_config(config: Mapping[str, Any]) -> Mapping[str, Any] | Finding:
    """The ordinary config.json as which vLLM reads one, or its error."""
    model_type = config.get("model_type")
    if model_type is None and config.get("speculators_config") is None:
        text = INVALID.format(
            "Unrecognized model in DRAFT. Should have a `model_type` key in its config.json."
        )
        return Finding("config", text, f"{OF_LAYERS}; or add speculators_config")
    if model_type == "eagle":
        return config  # which `architecture_problem` reads
    if model_type not in (None, "speculators"):
        return rewritten(draft_traits(config), config) or as_class_reads(config, "vllm", INVALID)
    kind = config.get("speculators_model_type")
    if kind not in tuple(_READ):  # of any JSON type
        if remedy := _NOT_READ.get(str(kind)):
            return Finding("config", INVALID.format("Expected one of: "), remedy)
        if isinstance(kind, str):
            text = f"Loading speculators_model_type {kind} was never executed"
            return Finding("unknown", text, "try it")
        return Finding("config", INVALID.format("Expected one of: "), "add speculators_model_type")
    layers = config.get(LAYER_CONFIG)
    if not isinstance(layers, Mapping):
        return Finding("init", _ATTRIBUTE.format("vocab_size"), _SAVE)
    qwen3 = _READ[kind].qwen3 or layers.get("model_type") == "qwen3"
    needed = (*(_NEEDED_BY_QWEN3 if qwen3 else ()), *_NEEDED)
    absent = next((key for key in needed if key not in layers), None)
    own = _READ[kind].read(config, layers)
    if isinstance(own, Finding):
        return own
    if absent is not None:
        return Finding("init", _ATTRIBUTE.format(absent), f"add {absent!r} to {LAYER_CONFIG}")
    null = next((key for key in _NEEDED_BY_QWEN3 if layers.get(key, 0) is None), None)
    if null is not None:
        text = f"TypeError: {null} is null in {LAYER_CONFIG}"
        return Finding("init", text, f"give {null!r} its value")
    shared = {
        "draft_vocab_size": config.get("draft_vocab_size"),
        "quantization_config": config.get("quantization_config")
        or layers.get("quantization_config"),
    }
    if config.get("target_hidden_size") is not None:
        shared["target_hidden_size"] = config["target_hidden_size"]
    return {**layers, **shared, **own}
