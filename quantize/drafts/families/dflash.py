"""DFlash: `DFlashDraftModel`, a few Qwen3 layers that fill in a block of mask tokens at once.

Sources: z-lab, SpecForge and TorchSpec exports; `qwen3_dflash.py` of vLLM 0.33, `dflash.py` and
`dflash_worker_v2.py` of SGLang 0.5.23. Where the engines differ, we follow vLLM: it honours
`causal`, `use_swa` and `swa_window_size` of `dflash_config`, and an embedding and head that the
draft ships; SGLang reads only `is_causal`, `layer_types` and `sliding_window`, and uses the
target's embedding and head. Both read `attention_sink_bias` and `attention_value_scale` there.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from ....recipes.errors import CheckpointError
from ....recipes.regular_file import MASK_EMBEDDING_FILE, check_own
from .. import engine_traits as traits
from ..architectures import declared_architecture
from ..config_reader import KEY, ConfigReader, Served, object_at
from ..family import Dim, Draft, Family, Lint, SpeculatorsForm, TensorSpec, Weights, told
from ..geometry import needed_mask
from ..shared import layers as decoder
from ..shared.block_layers import DFlashForward, DFlashGeometry, read_mask_embedding

BLOCK = 8
"""Tokens of a block where no key says how many: vLLM then uses the serving command's number."""


def read_in_vllm(config: Mapping[str, Any], _layers: Mapping[str, Any]) -> traits.ConfigRead:
    """The keys of an ordinary config.json, from one in the speculators layout."""
    ids = block_ids(config, "aux_hidden_state_layer_ids", "mask_token_id")
    if isinstance(ids, traits.Finding):
        return ids
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": ids,
            "causal": not config.get("sliding_window_non_causal", True),
        },
        "block_size": config.get("block_size") or BLOCK,
    }


def block_ids(config: Mapping[str, Any], *needed: str) -> list[int] | traits.Finding:
    """The target's layers, counted after them; or the error where a key is missing or wrong."""
    for key in needed:
        if key not in config:
            return traits.Finding("config", f"KeyError: {key!r}", f"add {key!r}, as it was trained")
    ids = config["aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return traits.Finding(
            "config",
            f"TypeError: '{type(ids).__name__}' object is no list of layers",
            "correct 'aux_hidden_state_layer_ids'",
        )
    return [i - 1 for i in ids]


def is_nemotron(draft: traits.ServedDraft) -> bool:
    """Whether SGLang takes it for a draft of Nemotron 3.5: `is_nemotron_35_draft_config`."""
    config, section = draft.config, object_at(draft.config, "dflash_config")
    both = {**config, **section}
    ids, inputs = both.get("target_layer_ids"), config.get(KEY)
    return (
        declared_architecture(config) in ("DFlashDraftModel", "Qwen3DSparkModel")
        and bool(config.get("has_embed_tokens"))
        and not config.get("has_lm_head")
        and object_at(config, "quantization_config").get("quant_algo") == "W4A16_NVFP4"
        and isinstance(ids, list)
        and bool(ids)
        and inputs == [i + 1 for i in ids]
        and both.get("sample_from_anchor") is False
    )


_SLIDING = "sliding_attention"
_SINKS = "attention_sink_bias"
_BACKEND = "trtllm_mha"


def in_sglang(draft: traits.ServedDraft) -> traits.Finding | None:
    """Rules of `get_dflash_attention_sliding_window_size` and of `DFlashAttention`.

    Qwen3's config class drops a sliding_window without use_sliding_window. The backend, which
    SGLang chooses by itself beside a Nemotron on a B200, has kernels for that GPU alone.
    """
    config, section = draft.config, object_at(draft.config, "dflash_config")
    dropped = config.get("model_type") == "qwen3" and not config.get("use_sliding_window")
    window = None if dropped else config.get("sliding_window")
    if is_nemotron(draft):
        window = window or section.get("swa_window_size")
    if window is None and _SLIDING in (config.get("layer_types") or ()):
        return traits.Finding(
            "init",
            "ValueError: DFLASH sliding_attention layers require config.sliding_window.",
            "write sliding_window, and use_sliding_window: true",
        )
    if _backend(draft) and not draft.gpu.is_one_of(("sm100",)):
        return traits.Finding(
            "init",
            f"ValueError: Nemotron 3.5 DSpark attention sinks require "
            f"--speculative-draft-attention-backend {_BACKEND}, got None.",
            "serve it on a B200, or with vLLM",
        )
    return None


def _backend(draft: traits.ServedDraft) -> str:
    return _BACKEND if draft.config.get(_SINKS) and is_nemotron(draft) else ""


ENGINE_TRAITS = traits.EngineTraits(
    drafts_blocks=True,
    prunes_vocabulary=True,
    usual_type="qwen3",
    vllm=traits.InVllm(
        architectures=frozenset({"DFlashDraftModel"}),
        served_as="dflash",
        roots=traits.refused_roots("DFlashQwen3Model", "model", "draft_model", "dflash_module"),
        targets_on_disk=frozenset({"modelopt"}),
        fusion=traits.Fusion(counted_by=(), refuses_null=False),  # `qwen3_dflash.py:84`
        head_declared="asked",  # `qwen3_dflash.py:755`
        maps_excludes=True,  # `qwen3_dflash.py`, and its kin
        speculators={"dflash": traits.Speculators(read_in_vllm, qwen3=True)},
    ),
    sglang=traits.InSglang(
        architectures=frozenset({"DFlashDraftModel"}),
        served_as="DFLASH",
        roots={"model.": None, **traits.dropped_roots("draft_model.", "dflash_module.")},
        shares_tables=True,
        layer_name="layers.{n}.{path}",
        layer_prefix="{leaf}",
        fc="fc",
        fusion=traits.Fusion(counted_by=(), reads_width=False),  # `dflash.py:762`
        problem=in_sglang,
        quantizes_fc=is_nemotron,  # `dflash.py:706`
        attention_backend=_backend,
    ),
    tensorrt_llm=traits.InTensorRtLlm(
        architectures=frozenset({"DFlashDraftModel"}), served_as="DFlash"
    ),
)


def dflash_keys(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    """The keys as DFlash reads them, from a config that the speculators package saved."""
    block = block_keys(keys)
    if keys.flag("sample_from_anchor", False):
        raise CheckpointError(
            keys.where,
            "sample_from_anchor: expected false, got true: the anchor's slot predicts as well",
            fix="this draft cannot be served: vLLM refuses it for DFlash",
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            **block,
            # vLLM applies this to every layer, full attention included, though the package trains
            # full layers in both directions. Executed: `update_dflash`, `_dflash_layer_causal`.
            "causal": not keys.flag("sliding_window_non_causal", True),
        },
    }


def block_keys(keys: ConfigReader) -> dict[str, Any]:
    """Keys that DFlash and the families built on it share."""
    ids_key = "aux_hidden_state_layer_ids"
    ids = keys.after_layer(ids_key)
    for key, value in ((ids_key, ids), ("mask_token_id", keys.config.get("mask_token_id"))):
        fix = f"add {key!r} as the draft was trained with it"
        if value is None:
            raise CheckpointError(keys.where, f"{key}: missing key", fix=fix)
    return {
        "target_layer_ids": ids,
        "mask_token_id": keys.config["mask_token_id"],
        "block_size": keys.positive("block_size"),
    }


def block_size(draft: Draft) -> Iterator[Lint]:
    """Source: `DEFAULT_BLOCK_SIZE`."""
    config = draft.checkpoint.config
    nested = config.get("dflash_config") or {}
    if config.get("block_size") is None and nested.get("block_size") is None:
        yield told("dflash-block-size-missing")


def causality(draft: Draft) -> Iterator[Lint]:
    """A draft trained with one mask and served with another.

    Source: vLLM 0.33 `_dflash_layer_causal`, `speculators/algos.py` `update_dflash`; SGLang 0.5.23
    `dflash.py` `_get_dflash_layer_attention_params`; z-lab/dflash @44947fb (never causal).
    """
    config = draft.checkpoint.config
    types = list(draft.layer_config.get("layer_types") or ())
    types = types or ["full_attention"] * draft.geometry.num_layers
    sliding = [kind == _SLIDING for kind in types]
    section: Mapping[str, Any] = config.get("dflash_config") or {}
    g: Any = draft.geometry
    causal = section.get("causal")
    if section.get("use_swa") and not any(sliding):
        keys = {"is_causal": g.causal, "layer_types": [_SLIDING] * g.num_layers}
        keys |= {"sliding_window": g.sliding_window, "use_sliding_window": True}
        yield told("dflash-use-swa", keys)
    elif draft.in_speculators_layout:
        if not config.get("sliding_window_non_causal", True):
            yield told(
                "dflash-speculators-causal" if any(sliding) else "dflash-speculators-causal-of-full"
            )
    elif config.get("is_causal") is not None:  # both engines read it before anything else
        return
    elif causal is None and any(sliding):
        yield told("dflash-sliding")
    elif causal is not None and any(causal != layer for layer in sliding):
        yield told(
            "dflash-causal", {"is_causal": causal, "layer_types": types}, said=str(causal).lower()
        )


DEFAULT_BLOCK_SIZE = 16
"""SGLang's where config.json has none (`dflash.py:703`); vLLM drafts as many as it is told to."""
_LAYER_TYPES = ("full_attention", _SLIDING)
_SERVED: Served = {
    "attention_bias": (False, "engines add biases that no quantized layout stores"),
    "mlp_bias": (False, "no engine reads them"),
    "hidden_act": ("silu", "another activation"),
    "use_gemma_norm": (False, "norms multiply by 1 + weight"),
    "is_neox_style": (True, "interleaved rotary pairs"),
    "rope_is_neox_style": (True, "interleaved rotary pairs"),
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
_KIN: Mapping[str, str] = {
    "base_kernel": "dflash2",
    "kernel_projection": "dflash2",
    "candidate_selector": "dflash2",
    "markov_": "dspark",
    "aux_hidden_norms": "laguna-dflash",
}
"""Part of a tensor name -> the family that has it, besides everything that DFlash has."""


class DFlash(Family):
    """The DFlash family with all its name variants."""

    name = "dflash"
    engine_traits = ENGINE_TRAITS
    speculators: Mapping[str, SpeculatorsForm] = {
        "dflash": SpeculatorsForm(("DFlashSpeculator", "DFlashDraftModel"), dflash_keys)
    }
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
    makes_features: tuple[str, ...] = ("fc.", "hidden_norm.")
    whole_vocabulary: str | None = None
    served: Served = _SERVED
    misnamed: Mapping[str, tuple[str, str]] = {
        # Loaded in both engines: `experiments/engines/names.json`.
        "dflash": ("model-type-dflash", "qwen3")
    }
    own_marks: Collection[str] = ("attention_sink",)
    relatives: Mapping[str, str] = {
        "mask_hidden": "P-EAGLE",
    }
    lints: tuple[Callable[[Draft], Iterator[Lint]], ...] = (block_size, causality)
    maths: type[DFlashForward] = DFlashForward

    @override
    def recognises(self, canonical_names: Collection[str]) -> bool:
        # Fc over features, a norm after it outside the layers, normed queries, its own marks.
        kinds = {kind for mark, kind in _KIN.items() if any(mark in n for n in canonical_names)}
        return kinds == {self.name} - {DFlash.name} and {
            "fc.weight",
            "hidden_norm.weight",
            "layers.0.self_attn.q_norm.weight",
        } <= set(canonical_names)

    @override
    def geometry(self, keys: ConfigReader) -> DFlashGeometry:
        return DFlashGeometry(**self.common_keys(keys))

    def options(self, keys: ConfigReader) -> ConfigReader:
        """The keys of config.json, with those of `dflash_config` over the top level's."""
        return _over(keys.section("dflash_config"), keys)

    def common_keys(self, keys: ConfigReader) -> dict[str, Any]:
        """The fields of `DFlashGeometry`; `dflash_config` takes precedence over the top level."""
        nested, options = keys.section("dflash_config"), self.options(keys)
        options.refuse_others(self.served)
        sizes = decoder.read_sizes(keys)
        hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
        block_size = options.positive("block_size", DEFAULT_BLOCK_SIZE)
        if block_size < 2:
            raise keys.wrong("block_size", "at least 2, an anchor and a mask", block_size)
        layer_types, causal = _layer_types(keys, sizes["num_layers"]), _causal(keys, nested)
        if _slides_everywhere(nested, layer_types):
            layer_types, causal = (_SLIDING,) * sizes["num_layers"], bool(causal)
        slides = layer_types is not None and _SLIDING in layer_types
        # vLLM prefers the key in `dflash_config`.
        own_window = options.config.get("swa_window_size") is not None
        window = "swa_window_size" if own_window else "sliding_window"
        return dict(
            **sizes,
            attention=decoder.read_heads(
                keys,
                sizes,
                qk_norm=True,
                sinks=_sinks(keys, nested),
                value_scale=nested.number("attention_value_scale", 1.0),
            ),
            draft_vocab_size=keys.positive("draft_vocab_size", vocab),
            target_hidden_size=keys.positive("target_hidden_size", hidden),
            aux_layer_ids=(ids := _target_layer_ids(options, flat=not nested.config)),
            num_aux_layers=len(ids),
            block_size=block_size,
            mask_token_id=_mask_token_id(options, vocab),
            layer_types=layer_types,
            sliding_window=options.positive(window) if slides else None,
            causal=causal,
        )

    @override
    def tensor_specs(self, geometry: Any) -> Mapping[str, TensorSpec]:
        g: DFlashGeometry = geometry
        hidden, width = decoder.dims(g, "hidden_size", "target_hidden_size")
        features = Dim(g.num_aux_layers * width.size, "target_hidden_size x target_layer_ids")
        norm = TensorSpec(role="norm", shape=(hidden,))
        fc = TensorSpec(role="fusion", shape=(hidden, features))
        around = {"fc.weight": fc, "hidden_norm.weight": norm, "norm.weight": norm}
        full = g.draft_vocab_size == g.vocab_size  # then the target's head serves as well
        table = decoder.vocabulary_specs(g, around, head_optional=full)
        for i in range(g.num_layers):
            table |= decoder.layer_specs(g, i)
        return table

    @override
    def side_weights(self, geometry: Any, folder: Path) -> Weights:
        # "mask_embedding" [hidden_size], where the file exists.
        path = folder / MASK_EMBEDDING_FILE
        check_own(folder, MASK_EMBEDDING_FILE)
        if not path.exists():
            return {}
        g = geometry
        return {"mask_embedding": read_mask_embedding(path, g.hidden_size, needed_mask(g))}


def _over(nested: ConfigReader, keys: ConfigReader) -> ConfigReader:
    """One object in which nested keys override equal keys of the top level."""
    given = {key: value for key, value in nested.config.items() if value is not None}
    return ConfigReader({**keys.config, **given}, keys.where)


def _layer_types(keys: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    types = keys.config.get("layer_types")
    if types is None:
        return None
    fits = isinstance(types, list) and len(types) == num_layers
    fits = fits and all(kind in _LAYER_TYPES for kind in types)
    known = " or ".join(_LAYER_TYPES)
    if not fits:
        raise CheckpointError(
            keys.where,
            f"layer_types: expected {known} for each of {num_layers} layers, got {types!r}",
            fix="correct 'layer_types' or 'num_hidden_layers'",
        )
    return tuple(types)


def _slides_everywhere(nested: ConfigReader, layer_types: tuple[str, ...] | None) -> bool:
    """Source: vLLM 0.33 `_resolve_layer_attention`, by which the layers stay in both directions."""
    return nested.flag("use_swa", False) and _SLIDING not in (layer_types or ())


def _sinks(keys: ConfigReader, nested: ConfigReader) -> bool:
    """Source: vLLM 0.33 `DFlashQwen3DecoderLayer`."""
    read = nested.flag(_SINKS, keys.flag(f"add_swa_{_SINKS}", False))
    if (declared := keys.flag(_SINKS, read)) != read:
        raise CheckpointError(
            keys.where,
            f"{_SINKS}: {declared} at the top level, but engines read {read} in dflash_config",
            fix="write in both places whether the draft was trained with attention sinks",
        )
    return read


def _causal(keys: ConfigReader, nested: ConfigReader) -> bool | None:
    """`is_causal` takes precedence over `dflash_config.causal`; None where neither is given."""
    for reader, key in ((keys, "is_causal"), (nested, "causal")):
        if reader.config.get(key) is not None:
            return reader.flag(key)
    return None


def _target_layer_ids(options: ConfigReader, *, flat: bool) -> tuple[int, ...]:
    """The target layers whose outputs are read, checked against the other keys that name them.

    `flat`: no dflash_config; such files of TorchSpec count the captured layers in
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
    depth = ids[-1] + 1 if flat else options.positive("num_target_layers", ids[-1] + 1)
    if ids[-1] >= depth:
        raise CheckpointError(
            options.where,
            f"target_layer_ids: expected ids below num_target_layers = {depth}, got {list(ids)}",
            fix="correct 'target_layer_ids' (0-based, counted after the layer)",
        )
    return ids


def _mask_token_id(options: ConfigReader, vocab_size: int) -> int | None:
    """Only a forward pass needs it, so its absence is no error before that."""
    value = options.config.get("mask_token_id")
    fits = value is None or (type(value) is int and 0 <= value < vocab_size)
    if not fits:
        raise CheckpointError(
            options.where,
            f"mask_token_id: expected a token id in [0, {vocab_size}), got {value!r}",
            fix="give the 'mask_token_id' that the draft was trained with",
        )
    return value


FAMILY = DFlash()
