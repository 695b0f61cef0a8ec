"""DFlash: `DFlashDraftModel`, a few Qwen3 layers that fill in a block of mask tokens at once.

Sources: z-lab, SpecForge and TorchSpec exports; `qwen3_dflash.py` of vLLM 0.33, `dflash.py` and
`dflash_worker_v2.py` of SGLang 0.5.23. Where the engines differ, vLLM is followed: it honours
`dflash_config.causal`, `dflash_config.swa_window_size`, and an embedding and head that the draft
ships; SGLang reads `is_causal` and `sliding_window` only and takes the target's embedding and head.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .....recipes.errors import CheckpointError
from .....recipes.regular_file import MASK_EMBEDDING_FILE, check_own
from ...config_reader import ConfigReader, Served
from ...family import Dim, Draft, Family, Lint, TensorSpec
from ...geometry import needed_mask
from ...rope import read_rope
from ...shared.attention.names import Shapes, grouped_shapes, head_norm_shapes, weight_names
from ...shared.mixture.names import mlp_shapes
from .engine_traits import ENGINE_TRAITS
from .geometry import DFlashGeometry
from .speculators_form import FORMS

if TYPE_CHECKING:
    import torch

    from ...forward import OnInput
    from ...passes import BlockForward

DEFAULT_BLOCK_SIZE = 16
"""Where config.json has none: SGLang's (`dflash.py:703`); vLLM drafts as many as it is told to."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SERVED: Served = {
    "attention_bias": (False, "engines add biases that no quantized layout stores"),
    "mlp_bias": (False, "no engine reads them"),
    "hidden_act": ("silu", "another activation"),
    "use_gemma_norm": (False, "norms multiply by 1 + weight"),
    "is_neox_style": (True, "interleaved rotary pairs"),
    "rope_is_neox_style": (True, "interleaved rotary pairs"),
    "partial_rotary_factor": (1, "a part of each head is rotated"),
    "rope_dim": (None, "a part of each head is rotated"),
    "use_swa": (False, "only vLLM slides the window over all layers"),
    "attention_sink_bias": (False, "attention sinks"),
    "add_swa_attention_sink_bias": (False, "attention sinks"),
    "attention_value_scale": (1, "scaled values"),
    "use_aux_hidden_state": (True, "a draft without fc"),
    "sample_from_anchor": (False, "the anchor's slot predicts, as in DSpark"),
    "shift_label": (False, "a slot predicts the next position"),
    "projector_type": (None, "another way to correct logits"),
    "conv_kernel_size": (0, "a DFlash2 draft"),
    "selector_rank": (0, "a DFlash2 draft"),
    "markov_rank": (0, "a DSpark draft"),
    "kv_lora_rank": (None, "layers with MLA"),
}
"""Config key -> the value that this family's maths is for (also where it is absent), and what
another value means."""
KIN: Mapping[str, str] = {
    "base_kernel": "dflash2",
    "kernel_projection": "dflash2",
    "candidate_selector": "dflash2",
    "markov_": "dspark",
}
"""Part of a tensor name -> the family that has it, besides all that DFlash has."""


class DFlash(Family):
    """The DFlash family with all its name variants."""

    name = "dflash"
    engine_traits = ENGINE_TRAITS
    speculators = FORMS
    architectures: tuple[str, ...] = ("DFlashDraftModel",)
    prefixes: tuple[tuple[str, str], ...] = (
        ("draft_model.", ""),
        ("dflash_module.", ""),
        ("model.", ""),
        ("encoder.fc.", "fc."),
        ("encoder.output_norm_enc.", "hidden_norm."),
        ("context_proj.", "fc."),
        ("context_norm.", "hidden_norm."),
        ("final_norm.", "norm."),
    )
    served_unquantized = ("embed_tokens", "fc", "lm_head")
    makes_features = ("fc.", "hidden_norm.")
    whole_vocabulary: str | None = None
    served: Served = _SERVED
    misnamed: Mapping[str, Lint] = {
        "dflash": Lint(  # loaded in both engines: `tests/engines/names.json`
            name="model-type",
            level="warning",
            cause="only TorchSpec knows model_type dflash: Transformers does not, so neither"
            " vLLM 0.33 nor SGLang 0.5.23 can read config.json",
            remedy="write qwen3, because the layers are those of Qwen3",
            fix={"model_type": "qwen3"},
        )
    }
    relatives: Mapping[str, str] = {
        "aux_hidden_norms.": "Laguna DFlash",
        "qkv_proj": "Laguna DFlash",
        "mask_hidden": "P-EAGLE",
    }

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """Fc over features, a norm behind it outside the layers, normed queries, its own marks."""
        kinds = {kind for mark, kind in KIN.items() if any(mark in n for n in canonical_names)}
        return kinds == {self.name} - {DFlash.name} and {
            "fc.weight",
            "hidden_norm.weight",
            "layers.0.self_attn.q_norm.weight",
        } <= set(canonical_names)

    @override
    def read_geometry(self, config: Mapping[str, Any], where: object) -> DFlashGeometry:
        return DFlashGeometry(**self.common_keys(config, where))

    def options(self, config: Mapping[str, Any], where: object) -> ConfigReader:
        """Config.json with the keys of `dflash_config` over those of the top level."""
        keys = ConfigReader(config, where)
        return _over(keys.section("dflash_config"), keys)

    def common_keys(self, config: Mapping[str, Any], where: object) -> dict[str, Any]:
        """The fields of `DFlashGeometry`; `dflash_config` goes before the top level, as in engines.

        Raises:
            CheckpointError: see `Family.read_geometry`.
        """
        keys = ConfigReader(config, where)
        nested, options = keys.section("dflash_config"), self.options(config, where)
        with_rope = options
        for section in ("rope_scaling", "rope_parameters"):
            with_rope = _over(with_rope, with_rope.section(section))
        ConfigReader(with_rope.config, where).refuse_others(self.served)
        hidden, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
        vocab, layers = keys.positive("vocab_size"), keys.positive("num_hidden_layers")
        block_size = options.positive("block_size", DEFAULT_BLOCK_SIZE)
        if block_size < 2:
            raise CheckpointError(
                where,
                f"block_size: expected at least 2, an anchor and a mask, got {block_size}",
                fix="correct 'block_size'",
            )
        layer_types = _layer_types(keys, layers)
        slides = layer_types is not None and "sliding_attention" in layer_types
        return dict(
            hidden_size=hidden,
            intermediate_size=keys.positive("intermediate_size"),
            num_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=keys.positive("num_key_value_heads", heads),
            head_dim=keys.positive("head_dim", hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=keys.positive("draft_vocab_size", vocab),
            target_hidden_size=keys.positive("target_hidden_size", hidden),
            aux_layer_ids=_target_layer_ids(options, flat=not nested.config),
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=read_rope(config, where),
            block_size=block_size,
            mask_token_id=_mask_token_id(options, vocab),
            layer_types=layer_types,
            sliding_window=_window(options) if slides else None,
            causal=_causal(keys, nested),
        )

    @override
    def tensor_specs(self, geometry: DFlashGeometry) -> Mapping[str, TensorSpec]:
        g = geometry
        hidden = Dim(g.hidden_size, "hidden_size")
        vocab = Dim(g.vocab_size, "vocab_size")
        draft_vocab = Dim(g.draft_vocab_size, "draft_vocab_size")
        features = Dim(
            g.num_aux_layers * g.target_hidden_size, "target_hidden_size x target_layer_ids"
        )
        full = g.draft_vocab_size == g.vocab_size  # then the target's head serves as well
        integers = ("I64", "I32")
        table = {
            "embed_tokens.weight": TensorSpec(
                role="embedding", shape=(vocab, hidden), optional=True
            ),
            "lm_head.weight": TensorSpec(role="head", shape=(draft_vocab, hidden), optional=full),
            "fc.weight": TensorSpec(role="fusion", shape=(hidden, features)),
            "hidden_norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "norm.weight": TensorSpec(role="norm", shape=(hidden,)),
            "d2t": TensorSpec(
                role="vocabulary_map", shape=(draft_vocab,), dtypes=integers, optional=full
            ),
            "t2d": TensorSpec(
                role="vocabulary_map", shape=(vocab,), dtypes=("BOOL",), optional=True
            ),
        }
        for i in range(g.num_layers):
            table |= {f"layers.{i}.{name}": spec for name, spec in _layer_specs(g).items()}
        return table

    @override
    def lints(self, draft: Draft) -> Iterator[Lint]:
        from .lints import LINTS

        return (lint for check in LINTS for lint in check(draft))

    @override
    def forward(
        self, geometry: Any, weights: "Mapping[str, torch.Tensor]", on_input: "OnInput"
    ) -> "BlockForward":
        from .forward import DFlashForward

        return DFlashForward(geometry, weights, on_input)

    @override
    def side_weights(self, geometry: DFlashGeometry, folder: Path) -> "Mapping[str, torch.Tensor]":
        # "mask_embedding" [hidden_size], where the file exists.
        from .mask_embedding import read_mask_embedding

        path = folder / MASK_EMBEDDING_FILE
        check_own(folder, MASK_EMBEDDING_FILE)
        if not path.exists():
            return {}
        g = geometry
        return {"mask_embedding": read_mask_embedding(path, g.hidden_size, needed_mask(g))}


def _layer_specs(g: DFlashGeometry) -> Mapping[str, TensorSpec]:
    """Name below "layers.N." -> its tensor; the same for every layer."""
    hidden = Dim(g.hidden_size, "hidden_size")
    inner = Dim(g.intermediate_size, "intermediate_size")
    shapes: Shapes = {
        **weight_names(grouped_shapes(g, hidden) | head_norm_shapes(g)),
        **mlp_shapes("mlp.", inner, hidden),
        "input_layernorm.weight": ("norm", (hidden,)),
        "post_attention_layernorm.weight": ("norm", (hidden,)),
    }
    return {name: TensorSpec(role=role, shape=shape) for name, (role, shape) in shapes.items()}


def _over(nested: ConfigReader, keys: ConfigReader) -> ConfigReader:
    """One object in which a nested key stands over the same key of the top level."""
    given = {key: value for key, value in nested.config.items() if value is not None}
    return ConfigReader({**keys.config, **given}, keys.where)


def _layer_types(keys: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    types = keys.config.get("layer_types")
    if types is None:
        return None
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in _LAYER_TYPES for kind in types)
    ):
        raise CheckpointError(
            keys.where,
            f"layer_types: expected {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers,"
            f" got {types!r}",
            fix="correct 'layer_types' or 'num_hidden_layers'",
        )
    return tuple(types)


def _window(options: ConfigReader) -> int:
    """The window of sliding layers; vLLM prefers the key of `dflash_config`."""
    own = options.config.get("swa_window_size")
    return options.positive("sliding_window" if own is None else "swa_window_size")


def _causal(keys: ConfigReader, nested: ConfigReader) -> bool | None:
    """`is_causal` goes before `dflash_config.causal`; None where neither is given."""
    for reader, key in ((keys, "is_causal"), (nested, "causal")):
        if reader.config.get(key) is not None:
            return reader.flag(key)
    return None


def _target_layer_ids(options: ConfigReader, *, flat: bool) -> tuple[int, ...]:
    """The target layers whose outputs are read, checked against the other keys that name them.

    Args:
        options: config.json, keys of dflash_config first.
        flat: no dflash_config; such files of TorchSpec count the captured layers in
            `num_target_layers`, others the layers of the target.
    """
    ids = options.layer_ids("target_layer_ids")
    if ids is None:
        raise CheckpointError(
            options.where,
            "target_layer_ids: missing key (engines guess different layers then)",
            fix="add 'target_layer_ids' to dflash_config as the draft was trained with it",
        )
    before = options.layer_ids("eagle_aux_hidden_state_layer_ids")  # vLLM: input of the layer
    if before is not None and before != tuple(i + 1 for i in ids):
        raise CheckpointError(
            options.where,
            f"eagle_aux_hidden_state_layer_ids: expected target_layer_ids + 1, got {list(before)}"
            f" beside {list(ids)}: vLLM would read other layers than SGLang",
            fix="drop the key, or correct one of the two",
        )
    depth = None if flat else options.positive("num_target_layers", ids[-1] + 1)
    if depth is not None and ids[-1] >= depth:
        raise CheckpointError(
            options.where,
            f"target_layer_ids: expected ids below num_target_layers = {depth}, got {list(ids)}",
            fix="correct 'target_layer_ids' (0-based, counted after the layer)",
        )
    return ids


def _mask_token_id(options: ConfigReader, vocab_size: int) -> int | None:
    """Only a forward pass needs it, so that its absence is no error before."""
    value = options.config.get("mask_token_id")
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise CheckpointError(
            options.where,
            f"mask_token_id: expected a token id in [0, {vocab_size}), got {value!r}",
            fix="give the 'mask_token_id' that the draft was trained with",
        )
    return value


FAMILY = DFlash()
