"""What engines say alike of names that no draft as it is served has."""

from collections.abc import Mapping
from typing import Any

from .contract import Finding, Question

_NO_TYPE = (
    "The checkpoint you are trying to load has model type `{}` but Transformers does not"
    " recognize this architecture."
)
_INVALID = (
    "StrictDataclassClassValidationError: Class validation error for validator 'validate_{}':"
    " ValueError: {}"
)
_WHOLE_HEADS = ("llama",)
"""model_type of which each head has hidden_size / num_attention_heads elements by default."""
_MORE_TYPES_THAN_LAYERS = ("step3p5",)
"""model_type whose config is the engines' own, which also lists the layers that it drafts with."""
MEDUSA_NAME = "MedusaModel"
MEDUSA = "serve it with vLLM 0.32, the last that has Medusa; in floats (draftquant dequantize)"
_OWN_TYPES: Mapping[str, str] = {"dflash": "set model_type to qwen3", "medusa": MEDUSA}
"""model_type that no engine knows -> what to do: TorchSpec's DFlash, and Medusa."""


def strip_root(root: str) -> str:
    """The remedy for tensors named ROOT.X."""
    return f"strip {root!r} from the names of the tensors, as its trainer's export does"


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
    if model_type in _MORE_TYPES_THAN_LAYERS:
        return None
    if isinstance(types, list) and type(layers) is int and len(types) != layers:
        what = f"`num_hidden_layers` ({layers}) must be equal to the number of `layer_types`"
        error = _INVALID.format("layer_type", f"{what} ({len(types)})")
        return Finding("config", error, "correct num_hidden_layers, or layer_types")
    return None


def eagle1_biases(question: Question) -> Finding | None:
    """`bias` of EAGLE-1's config means fc, and engines take it for the attention's.

    Source: vLLM 0.33 `llama.py:267`, SGLang 0.5.23 `llama.py:339`; executed.
    """
    config = question.config
    stored = any(name.endswith("q_proj.bias") for name in question.tensor_names)
    if not config.get("bias") or config.get("qkv_bias") is False or stored:
        return None
    return Finding(
        "wrong",
        "never written: model.layers.0.self_attn.qkv_proj.bias, which 'bias: true' asks for",
        "remove 'bias' from config.json: it was meant for fc",
    )
