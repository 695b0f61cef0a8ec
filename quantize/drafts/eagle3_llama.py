"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3.

Sources: SpecForge and TorchSpec exports, `llama_eagle3.py` of vLLM 0.33 and of SGLang 0.5.23.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...recipes.schema import Role
from ..errors import CheckpointError
from .config_reader import ConfigReader
from .family import Dim, Family, TensorSpec
from .rope import RopeConfig, read_rope

if TYPE_CHECKING:
    import torch

    from .forward import ChainForward, OnInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3LlamaGeometry:
    """Config of an EAGLE-3 Llama draft; widths in elements.

    Attributes:
        num_aux_layers: how many target layers are concatenated into the input of fc.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: EAGLE-3.1 and speculators
            options; all False in the published Kimi drafts.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux_layers: int
    aux_layer_ids: tuple[int, ...] | None
    rms_norm_eps: float
    rope: RopeConfig
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


class Eagle3Llama(Family):
    """The EAGLE-3 Llama family with all its name variants."""

    name = "eagle3-llama"
    architectures = ("LlamaForCausalLMEagle3",)
    prefixes = (("model.", ""), ("midlayer.", "layers.0."))
    fused_linears = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    served_unquantized = ("embed_tokens", "fc", "lm_head")

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Fc over target features, plain q_proj attention, no per-head norms (those are DFlash)."""
        return (
            "fc.weight" in canonical_names
            and "layers.0.self_attn.q_proj.weight" in canonical_names
            and "layers.0.hidden_norm.weight" in canonical_names
        )

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3LlamaGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        nested = keys.section("eagle_config")
        hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
        ids = nested.layer_ids("eagle_aux_hidden_state_layer_ids")
        vocab = keys.positive("vocab_size")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(
                where,
                f"hidden_act: expected 'silu', as {self.name} is served, got {activation!r}",
                fix="this draft cannot be replayed or served as it was trained",
            )
        for biased in ("attention_bias", "mlp_bias"):
            if keys.flag(biased, False):
                raise CheckpointError(
                    where,
                    f"{biased}: expected false, got true: {self.name} linears have no bias",
                    fix="this draft cannot be quantized: its biases would be lost when served",
                )
        return Eagle3LlamaGeometry(
            hidden_size=hidden,
            intermediate_size=keys.positive("intermediate_size"),
            num_layers=keys.positive("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=keys.positive("head_dim", hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=keys.positive("draft_vocab_size", vocab),
            target_hidden_size=keys.positive("target_hidden_size", hidden),
            num_aux_layers=len(ids) if ids else 3,
            aux_layer_ids=ids,
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=read_rope(config, where),
            norm_before_residual=keys.flag("norm_before_residual", False),
            norm_before_fc=keys.flag("norm_before_fc", False)
            or nested.flag("norm_before_fc", False),
            fc_norm=keys.flag("fc_norm", False),
            norm_output=keys.flag("norm_output", False),
        )

    def tensor_specs(self, geometry: Eagle3LlamaGeometry) -> Mapping[str, TensorSpec]:
        """See `Family.tensor_specs`."""
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        vocab, draft_vocab = (
            Dim(g.vocab_size, "vocab_size"),
            Dim(g.draft_vocab_size, "draft_vocab_size"),
        )
        features = Dim(
            g.num_aux_layers * g.target_hidden_size, "target_hidden_size x aux layer ids"
        )
        table = {
            "embed_tokens.weight": TensorSpec(
                role="embedding", shape=(vocab, hidden), optional=True
            ),
            "lm_head.weight": TensorSpec(role="head", shape=(draft_vocab, hidden), optional=True),
            "fc.weight": TensorSpec(role="fusion", shape=(hidden, features)),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "d2t": TensorSpec(
                role="vocabulary_map",
                shape=(draft_vocab,),
                dtypes=("I64", "I32"),
                optional=g.draft_vocab_size == g.vocab_size,
            ),
            "t2d": TensorSpec(
                role="vocabulary_map", shape=(vocab,), dtypes=("BOOL",), optional=True
            ),
        }
        if g.norm_before_fc:
            table["input_norm.weight"] = TensorSpec(role="norm", shape=(features,))
        if g.fc_norm:
            chunk = Dim(g.target_hidden_size, "target_hidden_size")
            for i in range(g.num_aux_layers):
                table[f"fc_norm.{i}.weight"] = TensorSpec(role="norm", shape=(chunk,))
        for i in range(g.num_layers):
            table |= _layer_specs(g, i)
        return table

    def forward(
        self,
        geometry: Eagle3LlamaGeometry,
        weights: "Mapping[str, torch.Tensor]",
        on_input: "OnInput",
    ) -> "ChainForward":
        """See `Family.forward`."""
        from .eagle3_forward import Eagle3Forward, LlamaAttention

        attention = LlamaAttention(head_dim=geometry.head_dim, rope=geometry.rope)
        return Eagle3Forward(geometry, weights, on_input, attention)


def _layer_specs(g: Eagle3LlamaGeometry, i: int) -> dict[str, TensorSpec]:
    """Layer 0 reads [embedding; hidden], twice as wide as the ordinary layers after it."""
    prefix = f"layers.{i}."
    hidden = Dim(g.hidden_size, "hidden_size")
    inner = Dim(g.intermediate_size, "intermediate_size")
    wide = Dim(2 * g.hidden_size, "2 x hidden_size") if i == 0 else hidden
    queries = Dim(g.num_attention_heads * g.head_dim, "num_attention_heads x head_dim")
    keys = Dim(g.num_key_value_heads * g.head_dim, "num_key_value_heads x head_dim")
    shapes: dict[str, tuple[Role, tuple[Dim, ...]]] = {
        "self_attn.q_proj": ("attention", (queries, wide)),
        "self_attn.k_proj": ("attention", (keys, wide)),
        "self_attn.v_proj": ("attention", (keys, wide)),
        "self_attn.o_proj": ("attention", (hidden, queries)),
        "mlp.gate_proj": ("mlp", (inner, hidden)),
        "mlp.up_proj": ("mlp", (inner, hidden)),
        "mlp.down_proj": ("mlp", (hidden, inner)),
        "input_layernorm": ("norm", (hidden,)),
        "post_attention_layernorm": ("norm", (hidden,)),
    }
    if i == 0:
        shapes["hidden_norm"] = ("norm", (hidden,))
    return {
        f"{prefix}{name}.weight": TensorSpec(role=role, shape=shape)
        for name, (role, shape) in shapes.items()
    }
