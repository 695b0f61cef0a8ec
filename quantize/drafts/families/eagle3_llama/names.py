"""EAGLE-3 with Llama layers: `LlamaForCausalLMEagle3`, the kind of kimi-k2.5-eagle3.

vLLM's `Eagle3Qwen3ForCausalLM` is the same with normed queries and keys. P-EAGLE is either with a
mask_hidden, and drafts all tokens of a round in one pass: `PEagleDraftModel` of SpecForge and
speculators, which vLLM 0.33 loads into the class of EAGLE-3 (`registry.py:698-706`).
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .....recipes.errors import CheckpointError, short
from ...architectures import declared_architecture
from ...config_reader import ConfigReader
from ...family import Dim, Lint, TensorSpec
from ...shared.attention.names import Shapes, grouped_shapes, head_norm_shapes
from ...shared.eagle3.geometry import Eagle3LlamaGeometry
from ...shared.eagle3.names import Eagle3, read_common
from .engine_traits import ENGINE_TRAITS, MASK_KEYS
from .speculators_form import FORMS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import ChainForward
    from ...shared.attention.forward import LlamaAttention


_ATTENTIONS = ("full_attention", "sliding_attention")
_PARALLEL = ("PEagleDraftModel", "PeagleQwen3ForCausalLM")
_NORMED_HEADS = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")


class Eagle3Llama(Eagle3):
    """The EAGLE-3 Llama family with all its name variants."""

    name = "eagle3-llama"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    misnamed: Mapping[str, Lint] = {}
    architectures = ("LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", *_PARALLEL)
    relatives: Mapping[str, str] = {
        mark: kind for mark, kind in Eagle3.relatives.items() if mark != "mask_hidden"
    }

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """A hidden_norm in layer 0 and plain q_proj; DFlash has that norm outside the layers."""
        return {
            "layers.0.self_attn.q_proj.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3LlamaGeometry:
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        heads, name = common["num_attention_heads"], declared_architecture(config)
        parallel = name in _PARALLEL
        if parallel and not common["fuses"]:
            raise CheckpointError(
                where,
                "use_aux_hidden_state: expected true of a P-EAGLE draft, got false",
                fix="correct 'use_aux_hidden_state' of eagle_config",
            )
        return Eagle3LlamaGeometry(
            **common,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=keys.positive("head_dim", common["hidden_size"] // heads),
            qk_norm=name in _NORMED_HEADS,
            parallel=parallel,
            mask_token_id=_mask_token_id(keys, common["vocab_size"]) if parallel else None,
            windows=_windows(keys, common["num_layers"]),
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        # P-EAGLE's mask stands in the place of target features.
        table = dict(super().tensor_specs(geometry))
        if geometry.parallel:
            features = Dim(
                geometry.num_aux_layers * geometry.target_hidden_size,
                "target_hidden_size x aux layer ids",
            )
            one = Dim(1, "one mask for all positions")
            table["mask_hidden"] = TensorSpec(role="mask", shape=(one, one, features))
        return table

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "ChainForward":
        if geometry.window is not None:
            raise CheckpointError(
                "config.json",
                f"layer_types: replay does not compute sliding layers of EAGLE-3: vLLM 0.33 serves"
                f" a window of {geometry.window} positions, SGLang 0.5.23 all positions",
                fix="measure this draft on a server; if it was trained without a window, replay a"
                " copy whose layer_types are all full_attention",
            )
        if not geometry.parallel:
            return super().forward(geometry, weights, on_input)
        from .forward import PEagleForward

        return PEagleForward(geometry, weights, on_input, self.attention(geometry))

    @override
    def attention_shapes(self, geometry: Eagle3LlamaGeometry, width: Dim) -> Shapes:
        shapes = grouped_shapes(geometry, width)
        return shapes | head_norm_shapes(geometry) if geometry.qk_norm else shapes

    @override
    def attention(self, geometry: Eagle3LlamaGeometry) -> "LlamaAttention":
        from ...shared.attention.forward import LlamaAttention

        g = geometry
        return LlamaAttention(head_dim=g.head_dim, rope=g.rope, qk_norm=g.qk_norm)


def _windows(keys: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer; () = all layers see all positions.

    Source: vLLM 0.33 `llama.py:189-207`, whose layer is not sliding without a sliding_window;
    `llama_eagle3.py` of SGLang 0.5.23 reads neither key.
    """
    types = keys.config.get("layer_types") or []
    if not isinstance(types, list) or any(kind not in _ATTENTIONS for kind in types):
        raise CheckpointError(
            keys.where,
            f"layer_types: expected {' or '.join(_ATTENTIONS)} for every layer, got {types!r}",
            fix="correct 'layer_types': the layers are those of Llama",
        )
    if _ATTENTIONS[1] not in types or keys.config.get("sliding_window") is None:
        return ()
    window = keys.positive("sliding_window")
    slides = [kind == _ATTENTIONS[1] for kind in (*types, *[""] * num_layers)]
    return tuple(window if slides[i] else None for i in range(num_layers))


def _mask_token_id(keys: ConfigReader, vocab_size: int) -> int | None:
    """Only replay needs it, so that its absence is no error before."""
    key = next((key for key in MASK_KEYS if keys.config.get(key) is not None), None)
    value = keys.config[key] if key else None
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise CheckpointError(
            keys.where,
            f"{key}: expected a token of the vocabulary of {vocab_size}, got {short(value)}",
            fix=f"correct {key!r}",
        )
    return value


FAMILY = Eagle3Llama()
