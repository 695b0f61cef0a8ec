"""The speculators layout: an ordinary draft whose config.json is spelled differently.

The draft's own keys stand at the top, those of its decoder layers in `transformer_layer_config`.
`plain_config` spells such a config as the families read it; what is written keeps the layout.

Where a key is missing, the draft is what vLLM would serve. SGLang 0.5.23 does not read this layout.

Sources: `config.py` of `eagle3`, `peagle`, `dflash`, `dspark` and `mtp` in speculators 0.9.0, which
has no dflash2 yet; `transformers_utils/configs/speculators/algos.py` of vLLM 0.33, which has no
mtp: such a layer is served inside its target, where the package's `scripts/stitch_mtp.py` puts it.
`eagle` is EAGLE-1 as 0.1 to 0.3 saved it (`models/eagle.py`, `convert/eagle/eagle_converter.py` of
0.2.0); no engine reads it any more.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...recipes.errors import short
from ..errors import CheckpointError
from .config_reader import ConfigReader, Served

LAYER_CONFIG = "transformer_layer_config"

_MARKS = ("speculators_model_type", "speculators_config", LAYER_CONFIG)
_ARCHITECTURES = {  # as the package's config class names them, and as its `save_pretrained` does
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dflash2": ("DFlash2Speculator", "DFlash2DraftModel"),
    "dspark": ("DSparkSpeculator", "DSparkDraftModel"),
    "eagle": ("EagleSpeculator",),
    "eagle3": ("Eagle3Speculator", "Eagle3DraftModel"),
    "mtp": ("MTPDraftModel", "MTPDraftModel"),
    "peagle": ("PEagleSpeculator", "PEagleDraftModel"),
}
_MTP_LAYERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Of those that the package trains, the ones that an engine has: `qwen3` has no gate."""
_EAGLE3_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """True if a config.json is spelled in the speculators layout."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    ours = [known[0] for known in _ARCHITECTURES.values()]
    return any(key in config for key in _MARKS) or name in ours


def plain_config(config: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """The config of a draft as its family reads it; returned unchanged if it is plain already.

    Args:
        config: the parsed config.json.
        where: named in errors.

    Raises:
        CheckpointError: no transformer_layer_config, a kind of draft that is not supported, or
            keys that contradict each other.
    """
    if not is_speculators(config):
        return config
    keys = ConfigReader(config, where)
    spell = _SPELL[_kind(keys)]
    if config.get(LAYER_CONFIG) is None:
        raise CheckpointError(
            where,
            f"{LAYER_CONFIG}: missing key, which holds the sizes of the draft's layers",
            fix="save the draft again with the speculators package",
        )
    layers = keys.section(LAYER_CONFIG)
    return {**layers.config, **_positive(keys, "draft_vocab_size", "target_hidden_size"),
            **spell(keys, layers)}  # fmt: skip


def _kind(keys: ConfigReader) -> str:
    """The supported speculators_model_type, in agreement with architectures."""
    kind, names = keys.config.get("speculators_model_type"), keys.config.get("architectures")
    if kind not in tuple(_SPELL):  # of any JSON type
        raise CheckpointError(
            keys.where,
            "speculators_model_type: missing key"
            if kind is None
            else f"speculators_model_type: {short(kind)} is not supported",
            fix=f"supported: {', '.join(_SPELL)}",
        )
    first, *behind = names if isinstance(names, list) and names else [None]
    layers = ([], [_LAYER_CLASS]) if kind == "eagle" else ([],)
    if first not in _ARCHITECTURES[kind] or behind not in layers:
        raise CheckpointError(
            keys.where,
            f"architectures: expected [{_ARCHITECTURES[kind][0]!r}], got {names!r}"
            f" beside speculators_model_type {kind!r}",
            fix="correct the one that the draft was not trained as",
        )
    return str(kind)


def _eagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """One Llama layer, whatever number of them the config says that was copied from the target's.

    What the package left out of it (`to_diff_dict`) is transformers' default of a LlamaConfig.
    """
    served: Served = {
        "transformer_layer_architecture": (_LAYER_CLASS, "a layer of another model"),
        "layernorms": (
            False,
            "a norm of the embedding and one before the head: what such a draft feeds back is"
            " defined nowhere, for its own package gives out no hidden states",
        ),
    }
    given = {key: value for key, value in keys.config.items() if value != "auto"}
    ConfigReader(given, keys.where).refuse_others(served)
    layers.refuse_others({"model_type": ("llama", "layers of another model")})
    defaults = {key: value for key, value in _LLAMA.items() if layers.config.get(key) is None}
    return {
        **defaults,
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": 1,
        "fusion_bias": keys.flag("fusion_bias", False),
    }


def _eagle3(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    model_type = layers.config.get("model_type")
    if model_type not in tuple(_EAGLE3_ARCHITECTURES):
        known = " or ".join(repr(name) for name in _EAGLE3_ARCHITECTURES)
        raise CheckpointError(
            layers.where,
            f"model_type: expected {known}, got {model_type!r}",
            fix="EAGLE-3 in this layout has layers of these two kinds only",
        )
    norm_before_fc, fc_norm = keys.flag("norm_before_fc", False), keys.flag("fc_norm", False)
    if norm_before_fc and fc_norm:
        raise CheckpointError(
            keys.where,
            "norm_before_fc and fc_norm are both true, but exclude each other",
            fix="keep the one that the draft was trained with",
        )
    ids_key = "eagle_aux_hidden_state_layer_ids"
    return {
        "architectures": [_EAGLE3_ARCHITECTURES[model_type]],
        # The package trains with false where the key is missing; vLLM serves true.
        "norm_before_residual": keys.flag("norm_before_residual", True),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": keys.flag("norm_output", False),
        "eagle_config": {ids_key: _after_layer(keys, ids_key)},
    }


def _peagle(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """EAGLE-3 with a mask; vLLM serves norm_before_residual false where the key is missing."""
    spelled = _eagle3(keys, layers)
    (architecture,) = spelled["architectures"]
    qwen3 = architecture == _EAGLE3_ARCHITECTURES["qwen3"]
    return {
        **spelled,
        "architectures": ["PeagleQwen3ForCausalLM" if qwen3 else "PEagleDraftModel"],
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "mask_token_id": keys.config.get("mask_token_id"),
    }


def _dflash(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    block = _block(keys)
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


def _dflash2(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dflash2`, which hands on these keys and no others."""
    plain = _dflash(keys, layers)
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**plain["dflash_config"], **_positive(keys, *own)},
    }


def _dspark(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    """Source: `update_dspark`; the package itself trains and saves `sample_from_anchor` true."""
    names = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_block(keys),
        **_positive(keys, "markov_rank"),
        **{name: keys.config[name] for name in names if keys.config.get(name) is not None},
        "sample_from_anchor": keys.flag("sample_from_anchor", False),
    }


def _mtp(keys: ConfigReader, layers: ConfigReader) -> dict[str, Any]:
    """Source: `convert/mtp/converter.py`, whose names `Qwen3NextMtp` knows."""
    count = keys.positive("num_nextn_predict_layers", 1)
    if count != 1:
        raise CheckpointError(
            keys.where,
            f"num_nextn_predict_layers: expected 1, got {count}: the package trains one layer",
            fix="correct 'num_nextn_predict_layers'",
        )
    model_type = layers.config.get("model_type")
    if model_type not in _MTP_LAYERS:
        raise CheckpointError(
            layers.where,
            f"model_type: expected {' or '.join(map(repr, _MTP_LAYERS))}, got {short(model_type)}",
            fix="no engine has an MTP layer of another kind in this layout",
        )
    return {"architectures": ["Qwen3NextMTP"], "mtp_num_hidden_layers": count}


def _block(keys: ConfigReader) -> dict[str, Any]:
    """What DFlash and what adds to it have in common."""
    ids_key = "aux_hidden_state_layer_ids"
    ids = _after_layer(keys, ids_key)
    for key, value in ((ids_key, ids), ("mask_token_id", keys.config.get("mask_token_id"))):
        if value is None:
            raise CheckpointError(
                keys.where,
                f"{key}: missing key",
                fix=f"add {key!r} as the draft was trained with it",
            )
    return {
        "target_layer_ids": ids,
        "mask_token_id": keys.config["mask_token_id"],
        "block_size": keys.positive("block_size"),
    }


def _after_layer(keys: ConfigReader, key: str) -> list[int] | None:
    """Indices into transformers' `hidden_states`, where 0 is the embedding, as 0-based layers."""
    ids = keys.layer_ids(key)
    if ids is None:
        return None
    if ids[0] == 0:
        raise CheckpointError(
            keys.where,
            f"{key}: expected ids from 1 (the output of layer 0), got {list(ids)}",
            fix="a draft that reads the target's embedding is not supported",
        )
    return [i - 1 for i in ids]


def _positive(keys: ConfigReader, *names: str) -> dict[str, int]:
    """Those of the keys that are given."""
    return {name: keys.positive(name) for name in names if keys.config.get(name) is not None}


_LAYER_CLASS = "LlamaDecoderLayer"
_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""Defaults of transformers' `LlamaConfig`, which is not written where it says them."""
_SPELL: Mapping[str, Callable[[ConfigReader, ConfigReader], dict[str, Any]]] = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "peagle": _peagle,
}
