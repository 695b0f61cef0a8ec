"""EAGLE-1 as versions 0.1 to 0.3 of the speculators package saved it; no engine reads it now."""

from collections.abc import Mapping
from typing import Any

from ...config_reader import ConfigReader, Served
from ...speculators_form import SpeculatorsForm

_LAYER_CLASS = "LlamaDecoderLayer"
_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Defaults of transformers' `LlamaConfig`, which is not written where it says them."""


def _eagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """One Llama layer, whatever number of them the config says that was copied from the target's.

    What the package left out of it (`to_diff_dict`) is transformers' default of a LlamaConfig.
    """
    served: Served = {
        "transformer_layer_architecture": (_LAYER_CLASS, "a layer of another model"),
        "layernorms": (
            False,
            "a norm of the embedding and one before the head: what such a draft feeds back is"
            " defined nowhere, for its own package gives out no hidden states",
        ),
    }
    given = {key: value for key, value in keys.config.items() if value != "auto"}
    ConfigReader(given, keys.where).refuse_others(served)
    layers.refuse_others({"model_type": ("llama", "layers of another model")})
    defaults = {key: value for key, value in _LLAMA.items() if layers.config.get(key) is None}
    return {
        **defaults,
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": 1,
        "fusion_bias": keys.flag("fusion_bias", False),
    }


FORMS = {"eagle": SpeculatorsForm(("EagleSpeculator",), _eagle, _LAYER_CLASS)}
