"""Ordinary Llama layers, which EAGLE-1 heads and small language models have: config and shapes."""

from collections.abc import Mapping
from typing import Any, Literal

from ....errors import CheckpointError
from ...config_reader import ConfigReader, Served
from ...family import Dim, TensorSpec
from ...rope import read_rope
from ..attention.names import (
    Shapes,
    grouped_shapes,
    head_norm_shapes,
    input_bias_shapes,
    weight_names,
)
from ..mixture.names import mlp_shapes
from .geometry import LlamaGeometry

LayerKind = Literal["Llama", "Qwen2", "Qwen3"]
_SERVED: Served = {
    "hidden_act": ("silu", "another activation"),
    "mlp_bias": (False, "biases of the MLP"),
    "use_sliding_window": (False, "a sliding window"),
    "logit_scale": (1, "scaled logits"),
    "hot_vocab_size": (None, "a part of the vocabulary"),
}


def read_llama(config: Mapping[str, Any], where: object, layers: LayerKind) -> dict[str, Any]:
    """The fields of `LlamaGeometry` that config.json gives.

    Biases are where vLLM 0.33 and SGLang 0.5.23 build them: vLLM `llama.py:267-275`,
    `qwen2.py:162`, `qwen3.py:208`; SGLang `llama.py:339`, `qwen2.py:194`.

    Raises:
        CheckpointError: a key is missing or wrong, or asks for what is not computed here.
    """
    keys = ConfigReader(config, where)
    keys.refuse_others(_SERVED)
    biased = keys.flag("attention_bias", False)
    if biased and layers == "Qwen3":
        raise CheckpointError(
            where,
            "attention_bias: expected false, got true: vLLM 0.33 gives o_proj of such a layer no"
            " bias, Transformers does",
            fix="this draft cannot be served as it was trained",
        )
    qkv = keys.flag("qkv_bias", layers == "Qwen2" or biased)
    hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    head_dim = keys.positive("head_dim", hidden // heads)
    if layers == "Qwen2" and head_dim * heads != hidden:
        raise CheckpointError(
            where,
            f"head_dim: expected hidden_size / num_attention_heads = {hidden // heads} of such"
            f" layers, got {head_dim}: vLLM 0.33 does not read the key, SGLang 0.5.23 does",
            fix="correct 'head_dim', or 'architectures': no width suits both",
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.positive("intermediate_size"),
        "num_layers": keys.positive("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.positive("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": keys.positive("vocab_size"),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(config, where),
        "input_bias": qkv,
        "output_bias": biased and layers == "Llama",
        "qk_norm": layers == "Qwen3",
        "tied": keys.flag("tie_word_embeddings", False),
    }


def layer_specs(g: LlamaGeometry, layer: int) -> dict[str, TensorSpec]:
    """The tensors of one layer, by canonical name."""
    hidden = Dim(g.hidden_size, "hidden_size")
    inner = Dim(g.intermediate_size, "intermediate_size")
    linears = grouped_shapes(g, hidden)
    shapes: Shapes = {
        **weight_names(linears),
        **mlp_shapes("mlp.", inner, hidden),
        "input_layernorm.weight": ("norm", (hidden,)),
        "post_attention_layernorm.weight": ("norm", (hidden,)),
    }
    if g.input_bias:
        shapes |= input_bias_shapes(linears)
    if g.output_bias:
        shapes["self_attn.o_proj.bias"] = ("norm", (hidden,))
    if g.qk_norm:
        shapes |= weight_names(head_norm_shapes(g))
    return {
        f"layers.{layer}.{name}": TensorSpec(role=role, shape=shape)
        for name, (role, shape) in shapes.items()
    }
