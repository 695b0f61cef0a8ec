"""A small language model that drafts for a larger one of the same vocabulary.

`LlamaForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`, as anyone publishes them: vLLM's
method `draft_model`, SGLang's STANDALONE. It reads tokens and nothing of the target.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader, Served
from ...family import Dim, Family, TensorSpec
from ...rope import read_rope
from ...shared.attention.names import (
    Shapes,
    grouped_shapes,
    head_norm_shapes,
    input_bias_shapes,
    weight_names,
)
from ...shared.mixture.names import mlp_shapes
from .engine_traits import ENGINE_TRAITS
from .geometry import LanguageModelGeometry

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import ChainForward

LayerKind = Literal["Llama", "Qwen2", "Qwen3"]
_LAYERS: Mapping[str, LayerKind] = {
    "LlamaForCausalLM": "Llama",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
}
_SERVED: Served = {
    "hidden_act": ("silu", "another activation"),
    "mlp_bias": (False, "biases of the MLP"),
    "use_sliding_window": (False, "a sliding window"),
    "logit_scale": (1, "scaled logits"),
    "hot_vocab_size": (None, "a part of the vocabulary"),
}
_ROOTS = frozenset({"embed_tokens", "layers", "norm", "lm_head"})


class LanguageModel(Family):
    """Small dense language models."""

    name = "language-model"
    engine_traits = ENGINE_TRAITS
    architectures = tuple(_LAYERS)
    prefixes = (("model.", ""),)
    served_unquantized = ("embed_tokens", "lm_head")
    is_whole_model = True
    whole_vocabulary = "engines load it as any other language model, with its whole vocabulary"
    served_root = "draft_model."
    shared_tables = ()  # a whole model has its own
    makes_features = ()
    relatives: Mapping[str, str] = {
        "markov": "DSpark",
        "candidate_selector": "DFlash2",
        "medusa": "Medusa",
        "eh_proj": "an MTP layer",
        "mtp.": "an MTP layer",
    }

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Whole layers, a final norm, and nothing besides but tables."""
        names = set(canonical_names)
        whole = {"norm.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.weight"}
        others = {name.partition(".")[0] for name in names} - _ROOTS
        return whole <= names and not others and "layers.0.hidden_norm.weight" not in names

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> LanguageModelGeometry:
        (architecture,) = config["architectures"]
        return _geometry(config, where, _LAYERS[architecture])

    @override
    def tensor_specs(self, geometry: LanguageModelGeometry) -> Mapping[str, TensorSpec]:
        # A tied model may store its head again, no other lacks it.
        g = geometry
        hidden, vocab = Dim(g.hidden_size, "hidden_size"), Dim(g.vocab_size, "vocab_size")
        table = {
            "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden)),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
        }
        head = TensorSpec(role="head", shape=(vocab, hidden), optional=g.tied, tied=g.tied)
        table["lm_head.weight"] = head
        for i in range(g.num_layers):
            table |= _layer_specs(g, i)
        return table

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "ChainForward":
        from .forward import LanguageModelForward

        return LanguageModelForward(geometry, weights, on_input)


def _geometry(config: Mapping[str, Any], where: object, layers: LayerKind) -> LanguageModelGeometry:
    """What config.json says of such layers.

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
    return LanguageModelGeometry(
        hidden_size=hidden,
        intermediate_size=keys.positive("intermediate_size"),
        num_layers=keys.positive("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=keys.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=keys.positive("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope=read_rope(config, where),
        input_bias=qkv,
        output_bias=biased and layers == "Llama",
        qk_norm=layers == "Qwen3",
        tied=keys.flag("tie_word_embeddings", False),
    )


def _layer_specs(g: LanguageModelGeometry, layer: int) -> dict[str, TensorSpec]:
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


FAMILY = LanguageModel()
