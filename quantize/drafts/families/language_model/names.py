"""A small language model that drafts for a larger one of the same vocabulary.

`LlamaForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`, as anyone publishes them: vLLM's
method `draft_model`, SGLang's STANDALONE. It reads tokens and nothing of the target.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...family import Dim, Family, TensorSpec
from ...shared.llama.geometry import LlamaGeometry
from ...shared.llama.names import LayerKind, layer_specs, read_llama
from .engine_traits import ENGINE_TRAITS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...kinds.chain import ChainForward

_LAYERS: Mapping[str, LayerKind] = {
    "LlamaForCausalLM": "Llama",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
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
    renames_cache_scales = True
    reduced_vocabulary = "engines load it as any other language model, with its whole vocabulary"
    served_root = "draft_model."
    shared_tables = ()  # a whole model has its own
    makes_features = ()
    relatives: Mapping[str, str] = {
        "markov": "DSpark",
        "prefix_gru.": "Domino",
        "candidate_selector": "DFlash2",
        "medusa": "Medusa",
        "eh_proj": "an MTP layer",
        "mtp.": "an MTP layer",
        ".experts.": "a mixture of experts",
    }

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Whole layers, a final norm, and nothing besides but tables."""
        names = set(canonical_names)
        whole = {"norm.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.weight"}
        others = {name.partition(".")[0] for name in names} - _ROOTS
        return whole <= names and not others and "layers.0.hidden_norm.weight" not in names

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> LlamaGeometry:
        (architecture,) = config["architectures"]
        fields = read_llama(config, where, _LAYERS[architecture])
        return LlamaGeometry(**fields, reads_features=False)

    @override
    def tensor_specs(self, geometry: LlamaGeometry) -> Mapping[str, TensorSpec]:
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
            table |= layer_specs(g, i)
        return table

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "ChainForward":
        from ...shared.llama.forward import LanguageModelForward

        return LanguageModelForward(geometry, weights, on_input)


FAMILY = LanguageModel()
