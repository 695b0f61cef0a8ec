"""EAGLE-3 and P-EAGLE as the speculators package saves them."""

from typing import Any

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader
from ...family import SpeculatorsForm, after_layer

_EAGLE3_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def _eagle3(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    model_type = layers.config.get("model_type")
    if model_type not in tuple(_EAGLE3_ARCHITECTURES):
        known = " or ".join(repr(name) for name in _EAGLE3_ARCHITECTURES)
        raise CheckpointError(
            layers.where,
            f"model_type: expected {known}, got {model_type!r}",
            fix="EAGLE-3 in this layout has layers of these two kinds only",
        )
    norm_before_fc, fc_norm = keys.flag("norm_before_fc", False), keys.flag("fc_norm", False)
    if norm_before_fc and fc_norm:
        raise CheckpointError(
            keys.where,
            "norm_before_fc and fc_norm are both true, but exclude each other",
            fix="keep the one that the draft was trained with",
        )
    ids_key = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": [_EAGLE3_ARCHITECTURES[model_type]],
        # The package trains with false where the key is missing; vLLM serves true.
        "norm_before_residual": keys.flag("norm_before_residual", True),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": keys.flag("norm_output", False),
        "eagle_config": {ids_key: after_layer(keys, ids_key)},
    }


def _peagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """EAGLE-3 with a mask; vLLM serves norm_before_residual false where the key is missing."""
    spelled = _eagle3(keys, layers)
    (architecture,) = spelled["architectures"]
    qwen3 = architecture == _EAGLE3_ARCHITECTURES["qwen3"]
    return {
        **spelled,
        "architectures": ["PeagleQwen3ForCausalLM" if qwen3 else "PEagleDraftModel"],
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "mask_token_id": keys.config.get("mask_token_id"),
    }


FORMS = {
    "eagle3": SpeculatorsForm(("Eagle3Speculator", "Eagle3DraftModel"), _eagle3),
    "peagle": SpeculatorsForm(("PEagleSpeculator", "PEagleDraftModel"), _peagle),
}
