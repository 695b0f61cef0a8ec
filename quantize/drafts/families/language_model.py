"""A small language model that drafts for a larger one of the same vocabulary.

`LlamaForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`, as anyone publishes them: vLLM's
method `draft_model`, SGLang's STANDALONE. It reads tokens and nothing from the target. Its layers
have grouped-query attention after a norm and an MLP after another norm, like Llama, Qwen2 (biased
queries, keys and values) or Qwen3 (normed heads): `llama.py`, `qwen2.py` and `qwen3.py` of
vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from .. import engine_traits as traits
from ..config_reader import ConfigReader, Served
from ..family import Family, TensorSpec
from ..forward import Attend
from ..geometry import RotatedGeometry, last_state
from ..maths import Tensor, embedding
from ..passes import TextForward
from ..shared import layers as decoder

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BARE = ("layers.", "embed_tokens.", "norm.")


def _without_root(draft: traits.ServedDraft) -> traits.Finding | None:
    """VLLM looks for every name except the head's below "model."."""
    bare = sorted(name for name in draft.tensor_names if name.startswith(_BARE))
    first = bare[0].partition(".")[0] if bare else ""
    if not bare:
        return None
    return traits.Finding(
        "load",
        f"ValueError: There is no module or parameter named '{first}'",
        'put "model." before the names of the tensors',
    )


ENGINE_TRAITS = traits.EngineTraits(
    whole_model=True,
    head="unless tied",
    vllm=traits.InVllm(
        architectures=frozenset(_ARCHITECTURES),
        served_as="draft_model",
        roots={"model.": None},
        problem=_without_root,
        head_declared="always",  # `llama.py`, `qwen2.py`, `qwen3.py`
    ),
    sglang=traits.InSglang(
        architectures=frozenset(_ARCHITECTURES),
        served_as="STANDALONE",
        roots={"model.": None},
        layer_prefix="model.layers.{n}.{path}",  # the whole name is passed on
        renames_block_scales=frozenset({"LlamaForCausalLM"}),  # `llama.py:723`
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelGeometry(RotatedGeometry):
    """Config of a language model."""

    tied: bool

    @property
    @override
    def reads_features(self) -> bool:
        return False


class LanguageModelForward(decoder.LayersForward, TextForward):
    """The layers of a language model, over the embedding."""

    @override
    def head(self) -> Tensor:
        # A tied head is the embedding.
        return self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # The hidden state of the previous step is not read.
        dtype = self.weights["layers.0.post_attention_layernorm.weight"].dtype  # that of the norms
        x = embedding(token_ids, self.weights["embed_tokens.weight"], dtype)
        for layer in range(self.geometry.num_layers):
            x = self.layer(layer, x, positions, attend)
        return x


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
    architectures = _ARCHITECTURES
    prefixes = (("model.", ""),)
    served_unquantized = ("embed_tokens", "lm_head")
    is_whole_model = True
    whole_vocabulary = "engines load it as any other language model, with its whole vocabulary"
    served_root = "draft_model."
    shared_tables = ()  # a whole model has its own
    makes_features = ()
    maths = LanguageModelForward
    relatives: Mapping[str, str] = {
        "markov": "DSpark",
        "candidate_selector": "DFlash2",
        "medusa": "Medusa",
        "eh_proj": "an MTP layer",
        "mtp.": "an MTP layer",
    }

    @override
    def recognises(self, canonical_names: Collection[str]) -> bool:
        # Whole layers, a final norm, and otherwise only tables.
        names = set(canonical_names)
        whole = {"norm.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.weight"}
        others = {name.partition(".")[0] for name in names} - _ROOTS
        return whole <= names and not others and "layers.0.hidden_norm.weight" not in names

    @override
    def geometry(self, keys: ConfigReader) -> LanguageModelGeometry:
        # Biases are where vLLM 0.33 and SGLang 0.5.23 build them: vLLM `llama.py:267-275`,
        # `qwen2.py:162`, `qwen3.py:208`; SGLang `llama.py:339`, `qwen2.py:194`.
        (architecture,) = keys.config["architectures"]
        layers = architecture.removesuffix("ForCausalLM")
        keys.refuse_others(_SERVED)
        biased = keys.flag("attention_bias", False)
        if biased and layers == "Qwen3":
            raise CheckpointError(
                keys.where,
                "attention_bias: expected false, got true: vLLM 0.33 gives o_proj of a Qwen3 layer"
                " no bias, Transformers does",
                fix="this draft cannot be served as it was trained",
            )
        sizes = decoder.read_sizes(keys)
        attention = decoder.read_heads(
            keys,
            sizes,
            input_bias=keys.flag("qkv_bias", layers == "Qwen2" or biased),
            output_bias=biased and layers == "Llama",
            qk_norm=layers == "Qwen3",
        )
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        width, whole = attention.head_dim, attention.head_dim * heads == hidden
        fits = whole or layers != "Qwen2"
        if not fits:
            raise CheckpointError(
                keys.where,
                f"head_dim: expected hidden_size / num_attention_heads = {hidden // heads} of such"
                f" layers, got {width}: vLLM 0.33 does not read the key, SGLang 0.5.23 does",
                fix="correct 'head_dim', or 'architectures': no width suits both",
            )
        return LanguageModelGeometry(
            **last_state(sizes), attention=attention, tied=keys.flag("tie_word_embeddings", False)
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        # A tied model may store its head again; other models must have one.
        g: LanguageModelGeometry = geometry
        hidden, vocab = decoder.dims(g, "hidden_size", "vocab_size")
        head = TensorSpec(role="head", shape=(vocab, hidden), optional=g.tied, tied=g.tied)
        table = {
            "embed_tokens.weight": TensorSpec(role="embedding", shape=(vocab, hidden)),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "lm_head.weight": head,
        }
        for i in range(g.num_layers):
            table |= decoder.layer_specs(g, i)
        return table


FAMILY = LanguageModel()
