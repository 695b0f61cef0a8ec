"""Laguna's DFlash: `DFlashLagunaForCausalLM`, DFlash with gates, and a norm of each feature.

Sources: `laguna_dflash.py` and `laguna.py` of vLLM 0.33.0, `DFlashLagunaForCausalLM` of
`dflash.py` and `configs/laguna.py` of SGLang 0.5.23; executed
(`experiments/engines/laguna_maths.json`). Names and keys are those of poolside's drafts: queries,
keys and values are one linear, and embedding and head are the target's. vLLM multiplies contexts by
that linear as it is stored, so it stays in floating point.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import override

from ....recipes.errors import CheckpointError
from .. import engine_traits as traits
from ..config_reader import ConfigReader, Served
from ..family import Dim, Draft, Lint, SpeculatorsForm, TensorSpec, Weights, told
from ..forward import ModulesForward, OnInput
from ..geometry import GroupedAttention
from ..maths import Tensor, torch
from ..rope import DEFAULT_THETA, SECTIONS
from ..shared.block_layers import DFlashForward, DFlashGeometry
from ..shared.layers import LlamaAttention, Projected, dims
from . import dflash
from .dflash import DFlash

_OWN_ROPE = {"sliding_attention": (10000.0, 1.0), "full_attention": (500000.0, 0.5)}
"""Type of a layer -> base and part of a head that is rotated, by transformers' LagunaConfig."""


def _in_vllm(draft: traits.ServedDraft) -> traits.Finding | None:
    """Rules of the config class, of `_get_dflash_layer_types`, and of both classes."""
    config = draft.config
    types = config.get("layer_types") or ["full_attention"]
    if config.get("draft_vocab_size") is None:
        text = "ValueError: Laguna DFlash config requires `draft_vocab_size`."
        return traits.Finding("init", text, "write draft_vocab_size: that of vocab_size")
    if len(set(types)) > 1:
        text = "NotImplementedError: Laguna DFlash drafter requires a uniform `layer_types`"
        return traits.Finding("init", text, "serve it with SGLang, which takes layers of two types")
    dense = set(config.get("mlp_layer_types") or ["sparse"]) == {"dense"}
    if config.get("num_experts") != 0 and not dense and draft.num_layers > 1:
        text = "KeyError: 'layers.1.mlp.down_proj.weight'"
        return traits.Finding("load", text, "write num_experts: 0, without which there are experts")
    if any(".qkv_proj." in n and not n.endswith(("weight", "bias")) for n in draft.tensor_names):
        return traits.Finding(
            "after load",
            "vLLM multiplies contexts by the quantized values of qkv_proj as they are stored",
            "keep qkv_proj in BF16, as quantize does: dequantize this draft and quantize it again",
        )
    return next((traits.Finding("wrong", each.cause, each.remedy) for each in _rope(config)), None)


def _rope(config: Mapping[str, Any]) -> Iterator[Lint]:
    """The rope that vLLM takes from LagunaConfig, whatever else config.json has."""
    types = config.get("layer_types") or ["full_attention"]
    own = _OWN_ROPE.get(str(types[0]))
    given = config.get("rope_theta", DEFAULT_THETA), config.get("partial_rotary_factor", 1.0)
    if own not in (None, given) and not any(config.get(section) for section in SECTIONS):
        fix = {"rope_parameters": {"rope_type": "default", "rope_theta": given[0]}}
        yield told("laguna-rope", fix, kind=types[0], own=own[0], part=own[1], theta=given[0])


def rope_of_class(draft: Draft) -> Iterator[Lint]:
    """Source: transformers 5.20 `configuration_laguna.py`; executed."""
    yield from _rope(draft.checkpoint.config)


_DFLASH = dflash.ENGINE_TRAITS
_ATTENTION: tuple[traits.Linear, ...] = (
    ("self_attn.qkv_proj", ("qkv_proj",), "column"),
    ("self_attn.g_proj", ("g_proj",), "column"),
    ("self_attn.o_proj", ("o_proj",), "row"),
)
_DOWN: traits.Linear = ("mlp.down_proj", ("down_proj",), "row")
_APART: tuple[traits.Linear, ...] = (
    ("mlp.gate_proj", ("gate_proj",), "column"),
    ("mlp.up_proj", ("up_proj",), "column"),
)
ENGINE_TRAITS = replace(
    _DFLASH,
    prunes_vocabulary=False,
    usual_type="laguna",
    vllm=replace(
        _DFLASH.vllm,
        architectures=frozenset({"DFlashLagunaForCausalLM"}),
        problem=_in_vllm,
        roots={},
        linears=(*_ATTENTION, *_APART, _DOWN),
        head_declared="never",
        maps_excludes=False,
        counts_from_0=True,
        rope_by_layer=True,
        speculators={},
    ),
    sglang=replace(
        _DFLASH.sglang,
        architectures=frozenset({"DFlashLagunaForCausalLM"}),
        linears=(*_ATTENTION, ("mlp.gate_up_proj", traits.GATE_UP.members, "column"), _DOWN),
    ),
    tensorrt_llm=replace(_DFLASH.tensorrt_llm, architectures=frozenset()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagunaGeometry(DFlashGeometry):
    """Config of a Laguna DFlash draft.

    `gating`: the output of the attention has a gate for each head, for each element, or none.
    """

    gating: Literal["per-head", "per-element"] | None
    attention: GroupedAttention  # pyright: ignore[reportGeneralTypeIssues]

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
        prefix, head_dim = f"layers.{layer}.self_attn.", self.attention.head_dim
        gate: Any = None
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
    makes_features: tuple[str, ...] = (*DFlash.makes_features, "aux_hidden_norms.")
    linears_per_layer = 4
    own_marks = (r"attn\.g_proj",)
    whole_vocabulary = "engines give it the target's whole head"
    misnamed: Mapping[str, tuple[str, str]] = {}
    served: Served = {  # noqa: RUF012 - a constant of the class
        **DFlash.served,
        "swa_attention_sink_enabled": (False, "attention sinks, which vLLM alone builds"),
    }
    lints = (*DFlash.lints, rope_of_class)
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
