"""How Transformers refuses a config.json, before an engine asks what is in it."""

from collections.abc import Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from .engine import TRAITS

_NO_TYPE = (
    "The checkpoint you are trying to load has model type `{}` but Transformers does not"
    " recognize this architecture."
)
_INVALID = (
    "StrictDataclassClassValidationError: Class validation error for validator 'validate_{}':"
    " ValueError: {}"
)
NO_NAME = "config.json has no architectures, by which engines choose the model"
OF_LAYERS = "set model_type to that of the draft's layers, such as llama"
_WHOLE_HEADS = ("llama",)
"""model_type of which each head has hidden_size / num_attention_heads elements by default."""
_OWN_TYPES = {name: remedy for traits in TRAITS for name, remedy in traits.own_types.items()}
_MORE_TYPES_THAN_LAYERS = frozenset().union(*(traits.more_types_than_layers for traits in TRAITS))


def transformers_problem(config: Mapping[str, Any], text: str) -> Finding | None:
    """Why Transformers refuses a config.json: a trainer's own model_type, or sizes at odds.

    Source: `configuration_utils.py` and `configuration_llama.py` of Transformers 5.20, executed.
    """
    model_type = config.get("model_type")
    if model_type in tuple(_OWN_TYPES):  # of any JSON type
        error = text.format(_NO_TYPE.format(model_type))
        return Finding("config", error, _OWN_TYPES[model_type])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # which is no draft
    if model_type in _WHOLE_HEADS and hidden % heads:
        what = f"The hidden size ({hidden}) is not a multiple of the number of attention heads"
        error = _INVALID.format("architecture", f"{what} ({heads}).")
        return Finding("config", error, "train the draft with another size")
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if model_type in tuple(_MORE_TYPES_THAN_LAYERS):  # of any JSON type
        return None
    if isinstance(types, list) and type(layers) is int and len(types) != layers:
        what = f"`num_hidden_layers` ({layers}) must be equal to the number of `layer_types`"
        error = _INVALID.format("layer_type", f"{what} ({len(types)})")
        return Finding("config", error, "correct num_hidden_layers, or layer_types")
    return None
