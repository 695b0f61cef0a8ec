"""EAGLE-1, EAGLE-2 and HASS: the kind of yuhuili/EAGLE-LLaMA3.1-Instruct-8B.

One or more Llama layers behind fc over [embedding; the target's last hidden state]; the head is the
target's, the embedding usually too. EAGLE-2 and HASS train and search otherwise, the drafts are the
same. Layer 0 has no norm before its attention, and no norm stands before the head.

Heads of Mistral's format, of MiniCPM and of DeepSeek have norms and scales of their own, and are
refused by the tensors that these have.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ....errors import CheckpointError
from ...architectures import declared_architecture
from ...config_reader import ConfigReader
from ...family import Dim, Family, TensorSpec
from ...shared.llama.geometry import LlamaGeometry
from ...shared.llama.names import layer_specs, read_llama
from .engine_traits import ENGINE_TRAITS
from .speculators_form import FORMS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...kinds.chain import ChainForward


class Eagle1Llama(Family):
    """The EAGLE-1 family with all its name variants."""

    name = "eagle1-llama"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    one_layer = True
    renames_cache_scales = True
    architectures = ("EagleLlamaForCausalLM", "Qwen2ForCausalLMEagle")
    prefixes = (
        ("model.", ""),
        ("fusion_fc.", "fc."),  # speculators 0.1 to 0.3
        ("transformer.", "layers.0."),
    )
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ()
    reduced_vocabulary = (
        "engines build it with the target's whole vocabulary; SGLang takes fewer rows of the"
        " target's head by a file of token ids (--speculative-token-map), which is no part of the"
        " draft"
    )
    relatives: Mapping[str, str] = {
        "embedding_layernorm.": "EAGLE-1 with speculators' layernorms",
        "pre_lm_head_layernorm.": "EAGLE-1 with speculators' layernorms",
        "layers.0.input_layernorm.": "EAGLE-1 with a norm before its first layer",
        "input_norm1.": "EAGLE-1 of MiniCPM",
        "enorm.": "EAGLE-1 of DeepSeek",
        "eagle_linear.": "EAGLE-1 in Mistral's format",
    }

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Fc, and layers without the norms of hidden states that EAGLE-3 and DFlash have."""
        names = set(canonical_names)
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and not any(
            name.endswith("hidden_norm.weight") or name == "norm.weight" for name in names
        )

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> LlamaGeometry:
        keys = ConfigReader(config, where)
        if keys.flag("layernorms", False):
            raise CheckpointError(
                where,
                "layernorms: expected false, got true: a norm of the embedding and one before the"
                " head, which no engine serves",
                fix="train the draft without them",
            )
        said = keys.config.get("fusion_bias") is not None  # by speculators, which always does
        qwen2 = declared_architecture(config).startswith("Qwen2")
        fields = read_llama(config, where, "Qwen2" if qwen2 else "Llama")
        return LlamaGeometry(**fields, fc_bias=keys.flag("fusion_bias", False) if said else None)

    @override
    def tensor_specs(self, geometry: LlamaGeometry) -> Mapping[str, TensorSpec]:
        # Fc has a bias where it was trained with one.
        g = geometry
        hidden, vocab = Dim(g.hidden_size, "hidden_size"), Dim(g.vocab_size, "vocab_size")
        both = Dim(2 * g.hidden_size, "2 x hidden_size")
        table = {
            "embed_tokens.weight": TensorSpec(
                role="embedding", shape=(vocab, hidden), optional=True
            ),
            "lm_head.weight": TensorSpec(role="head", shape=(vocab, hidden), optional=True),
            "fc.weight": TensorSpec(role="fusion", shape=(hidden, both)),
        }
        if g.fc_bias is not False:
            table["fc.bias"] = TensorSpec(role="norm", shape=(hidden,), optional=not g.fc_bias)
        for i in range(g.num_layers):
            table |= layer_specs(g, i)
        del table["layers.0.input_layernorm.weight"]
        return table

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "ChainForward":
        from ...shared.llama.forward import Eagle1Forward

        return Eagle1Forward(geometry, weights, on_input)


FAMILY = Eagle1Llama()
