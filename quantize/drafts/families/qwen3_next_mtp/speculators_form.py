"""Qwen's MTP layer as the speculators package saves it."""

from typing import Any

from .....recipes.errors import CheckpointError, short
from ...config_reader import ConfigReader
from ...family import SpeculatorsForm

_MTP_LAYERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Of those that the package trains, the ones that an engine has: `qwen3` has no gate."""


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


FORMS = {"mtp": SpeculatorsForm(("MTPDraftModel", "MTPDraftModel"), _mtp)}
