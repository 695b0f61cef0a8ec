"""What the maths and the shapes of ordinary Llama layers follow from, and reading it.

EAGLE-1 heads and small language models have such layers: grouped-query attention behind a norm and
an MLP behind another, in Llama's, Qwen2's (biased queries, keys and values) and Qwen3's (normed
heads) way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CheckpointError
from .attention_shapes import (
    Shapes,
    grouped_shapes,
    head_norm_shapes,
    input_bias_shapes,
    weight_names,
)
from .config_reader import ConfigReader
from .family import Dim, TensorSpec
from .mixture import mlp_shapes
from .rope import RopeConfig, read_rope

LayerKind = Literal["Llama", "Qwen2", "Qwen3"]
_SERVED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "another activation"),
    "mlp_bias": (False, "biases of the MLP"),
    "use_sliding_window": (False, "a sliding window"),
    "logit_scale": (1, "scaled logits"),
    "hot_vocab_size": (None, "a part of the vocabulary"),
}
"""Config key -> the value that the maths here is for (also where it is absent), and what another
one means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaGeometry:
    """Config of a draft of ordinary layers, which has the target's whole vocabulary.

    Attributes:
        input_bias: queries, keys and values have biases. output_bias: so has what they mix into.
        qk_norm: each head's query and key is normed before it is rotated.
        fuses: False: there is no fc over outputs of the target's layers.
        reads_features: False for a draft that reads tokens alone.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    input_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    fuses: bool = False
    reads_features: bool = True

    @property
    def draft_vocab_size(self) -> int:
        """All of the target's tokens."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The draft is as wide as the target."""
        return self.hidden_size

    @property
    def num_aux_layers(self) -> int:
        """One: the target's last hidden state."""
        return 1

    @property
    def aux_layer_ids(self) -> None:
        """None: no output of a layer is read."""
        return

    @property
    def block_size(self) -> None:
        """None: the draft proposes a chain."""
        return


def read_llama(config: Mapping[str, Any], where: object, layers: LayerKind) -> dict[str, Any]:
    """The fields of `LlamaGeometry` that config.json gives.

    Biases are where vLLM 0.33 and SGLang 0.5.23 build them: vLLM `llama.py:267-275`,
    `qwen2.py:162`, `qwen3.py:208`; SGLang `llama.py:339`, `qwen2.py:194`.

    Raises:
        CheckpointError: a key is missing or wrong, or asks for what is not computed here.
    """
    keys = ConfigReader(config, where)
    _check_served(keys)
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
            f" layers, got {head_dim}: engines do not read the key",
            fix="correct 'head_dim', or 'architectures'",
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


def _check_served(keys: ConfigReader) -> None:
    for key, (served, meaning) in _SERVED.items():
        value = keys.config.get(key)
        if value is not None and value != served:
            raise CheckpointError(
                keys.where,
                f"{key}: expected {served!r}, got {value!r}: {meaning}",
                fix="a draft with it is not supported: its maths is not known here",
            )
