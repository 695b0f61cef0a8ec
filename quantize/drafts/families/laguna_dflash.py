"""Laguna's DFlash: `DFlashLagunaForCausalLM`, DFlash with gates, and a norm of each feature.

Sources: `laguna_dflash.py` and `laguna.py` of vLLM 0.33.0, `DFlashLagunaForCausalLM` of
`dflash.py` and `configs/laguna.py` of SGLang 0.5.23; executed
(`experiments/engines/laguna_maths.json`). Names and keys are those of poolside's drafts: queries,
keys and values are one linear, and embedding and head are the target's. vLLM multiplies contexts by
that linear as it is stored, so it stays in floating point.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import override

from ....recipes.errors import CheckpointError
from .. import engine_traits as traits
from ..config_reader import ConfigReader, Served
from ..family import Dim, SpeculatorsForm, TensorSpec, Weights
from ..forward import ModulesForward, OnInput
from ..maths import Tensor, torch
from ..shared.block_layers import DFlashForward, DFlashGeometry
from ..shared.layers import LlamaAttention, Projected, dims
from . import dflash
from .dflash import DFlash

ENGINE_TRAITS = replace(
    dflash.ENGINE_TRAITS,
    prunes_vocabulary=False,
    usual_type="laguna",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaGeometry(DFlashGeometry):
    """Config of a Laguna DFlash draft.

    `gating`: the output of the attention has a gate for each head, for each element, or none.
    """

    gating: Literal["per-head", "per-element"] | None

    @property
    def gates(self) -> int:
        """Rows of g_proj."""
        width = self.attention.head_dim if self.gating == "per-element" else 1
        return self.num_attention_heads * width


class LagunaAttention(LlamaAttention):
    """Grouped-query attention: [q; k; v] = W x, and the output times softplus(G x)."""

    def __init__(self, geometry: LagunaGeometry) -> None:
        super().__init__(geometry)
        keys = self.attention.num_key_value_heads * self.attention.head_dim
        self.widths = [geometry.num_attention_heads * self.attention.head_dim, keys, keys]
        self.gating = geometry.gating

    @override
    def project(self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward) -> Projected:
        prefix, head_dim, gate = f"layers.{layer}.self_attn.", self.attention.head_dim, None
        queries, keys, values = self._parts(layer, x, modules)
        q = self.turned(f"{prefix}q_norm", queries, at, modules)
        k, v = self.cached(layer, keys, values, at, modules)
        if self.gating is not None:
            wide = modules.kept_linear(f"{prefix}g_proj", x)
            gate = torch.nn.functional.softplus(wide).to(x.dtype)
        if self.gating == "per-head":
            gate = gate.repeat_interleave(head_dim, dim=-1)
        return Projected(q, k, v, head_dim**-0.5, gate)

    @override
    def keys_values(
        self, layer: int, x: Tensor, at: Tensor, modules: ModulesForward
    ) -> tuple[Tensor, Tensor]:
        _, keys, values = self._parts(layer, x, modules)
        return self.cached(layer, keys, values, at, modules)

    def _parts(self, layer: int, x: Tensor, modules: ModulesForward) -> tuple[Tensor, ...]:
        fused = modules.linear(f"layers.{layer}.self_attn.qkv_proj", x)
        return torch.split(fused, self.widths, dim=-1)


class LagunaForward(DFlashForward):
    """One Laguna DFlash draft, whose layers norm the context's rows as they norm the block's."""

    geometry: LagunaGeometry

    def __init__(self, geometry: LagunaGeometry, weights: Weights, on_input: OnInput) -> None:
        super().__init__(geometry, weights, on_input)
        self.attention = LagunaAttention(geometry)

    @override
    def fuse(self, features: Tensor) -> Tensor:
        each = features.chunk(self.geometry.num_aux_layers, dim=-1)
        normed = [self.norm(f"aux_hidden_norms.{i}", one) for i, one in enumerate(each)]
        return super().fuse(torch.cat(normed, dim=-1))

    @override
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().context(layer, self.norm(f"layers.{layer}.input_layernorm", rows), positions)


class LagunaDFlash(DFlash):
    """The Laguna DFlash family."""

    name = "laguna-dflash"
    engine_traits = ENGINE_TRAITS
    speculators: Mapping[str, SpeculatorsForm] = {}
    architectures = ("DFlashLagunaForCausalLM",)
    prefixes = (("model.", ""),)
    makes_features = (*DFlash.makes_features, "aux_hidden_norms.")
    linears_per_layer = 4
    own_marks = (r"attn\.g_proj",)
    whole_vocabulary = "engines give it the target's whole head"
    misnamed: Mapping[str, tuple[str, str]] = {}
    served: Served = {  # noqa: RUF012 - a constant of the class
        **DFlash.served,
        "swa_attention_sink_enabled": (False, "attention sinks, which vLLM alone builds"),
    }
    lints = (*DFlash.lints,)
    maths = LagunaForward

    @override
    def geometry(self, keys: ConfigReader) -> LagunaGeometry:
        common, heads = self.common_keys(keys), keys.config.get("num_attention_heads_per_layer")
        given = common["num_attention_heads"]
        if heads not in (None, [given] * common["num_layers"]):
            raise CheckpointError(
                keys.where,
                f"num_attention_heads_per_layer: expected num_attention_heads {given} of every"
                f" layer, got {heads}: SGLang knows one number",
                fix="no engine but vLLM serves this draft, and replay does not compute it",
            )
        rows, vocab = common["draft_vocab_size"], common["vocab_size"]
        if rows != vocab:
            raise CheckpointError(
                keys.where,
                f"draft_vocab_size: expected vocab_size {vocab}, got {rows}: engines give this"
                " draft the target's whole head",
                fix="no engine serves a Laguna draft of another vocabulary",
            )
        gating = keys.config.get("gating", True)
        if gating not in (True, False, None, "per-head", "per-element"):
            raise CheckpointError(
                keys.where,
                f"gating: expected true, false, 'per-head' or 'per-element', got {gating!r}, which"
                " engines read differently",
                fix="write what the draft was trained with",
            )
        return LagunaGeometry(**common, gating="per-head" if gating is True else gating or None)

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: LagunaGeometry = geometry
        hidden, width = dims(g, "hidden_size", "target_hidden_size")
        keys = 2 * g.attention.num_key_value_heads
        rows = (g.num_attention_heads + keys) * g.attention.head_dim
        heads = "(num_attention_heads + 2 x num_key_value_heads) x head_dim"
        fused = TensorSpec(role="kv_up", shape=(Dim(rows, heads), hidden))
        gate = TensorSpec(
            role="router", shape=(Dim(g.gates, "num_attention_heads, gating"), hidden)
        )
        apart = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
        table = {n: s for n, s in super().tensor_specs(g).items() if not n.endswith(apart)}
        for i in range(g.num_layers):
            table[f"layers.{i}.self_attn.qkv_proj.weight"] = fused
            if g.gating is not None:
                table[f"layers.{i}.self_attn.g_proj.weight"] = gate
        for i in range(g.num_aux_layers):
            norm = TensorSpec(role="norm", shape=(width,))
            table[f"aux_hidden_norms.{i}.weight"] = norm
        return {name: spec for name, spec in table.items() if spec.role != "vocabulary_map"}


FAMILY = LagunaDFlash()
