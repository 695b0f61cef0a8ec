"""What engines say alike of names that no draft as it is served has."""

from collections.abc import Mapping
from typing import Any

from .contract import Finding, Question

_NO_TYPE = (
    "The checkpoint you are trying to load has model type `{}` but Transformers does not"
    " recognize this architecture."
)
MEDUSA_NAME = "MedusaModel"
MEDUSA = "serve it with vLLM 0.32, the last that has Medusa; in floats (draftquant dequantize)"
_OWN_TYPES: Mapping[str, str] = {"dflash": "set model_type to qwen3", "medusa": MEDUSA}
"""model_type that no engine knows -> what to do: TorchSpec's DFlash, and Medusa."""


def strip_root(root: str) -> str:
    """The remedy for tensors named ROOT.X."""
    return f"strip {root!r} from the names of the tensors, as its trainer's export does"


def own_type(config: Mapping[str, Any], text: str) -> Finding | None:
    """A trainer's name of its class of config, where an engine looks for one of Transformers."""
    model_type = config.get("model_type")
    if model_type not in tuple(_OWN_TYPES):  # of any JSON type
        return None
    error = text.format(_NO_TYPE.format(model_type))
    return Finding("config", error, _OWN_TYPES[model_type])


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
