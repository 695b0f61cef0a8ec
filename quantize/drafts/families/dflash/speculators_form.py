"""DFlash as the speculators package saves it."""

from collections.abc import Mapping
from typing import Any

from .....recipes.errors import CheckpointError
from ...config_reader import ConfigReader
from ...family import SpeculatorsForm, after_layer


def dflash_keys(keys: ConfigReader, _layers: ConfigReader) -> dict[str, Any]:
    """The keys as DFlash reads them, from a config in this layout."""
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
    """What DFlash and what adds to it have in common."""
    ids_key = "aux_hidden_state_layer_ids"
    ids = after_layer(keys, ids_key)
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


FORMS: Mapping[str, SpeculatorsForm] = {
    "dflash": SpeculatorsForm(("DFlashSpeculator", "DFlashDraftModel"), dflash_keys)
}
