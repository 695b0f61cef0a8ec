"""config.json and index of a target with a layer grafted into it."""

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..files.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, read_json_object
from ..files.side_files import json_texts
from ..stored.declarations import HF_QUANT_CONFIG, RawDeclaration
from .conventions import Merged

_COUNT = "num_nextn_predict_layers"
_COUNT_OF_QWEN = "mtp_num_hidden_layers"
_DECLARATION, _NESTED, _TEXT = "quantization_config", "quantization", "text_config"
_ELSEWHERE = "compression_config"


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """config.json that says how many MTP layers there are, in the family's own key.

    Engines read `num_nextn_predict_layers`, of Qwen3.5 `mtp_num_hidden_layers` of the text model.
    """
    text = config.get(_TEXT)
    if isinstance(text, Mapping):
        key = _COUNT if _COUNT in text else _COUNT_OF_QWEN
        return {**config, _TEXT: {**text, key: count}}
    if _COUNT_OF_QWEN in config:
        return {**config, _COUNT_OF_QWEN: count}
    return {**config, _COUNT: count}


def check_one_declaration(target: Checkpoint) -> None:
    """A declaration stands where engines and this package look for one.

    Raises:
        CheckpointError: it is elsewhere.
    """
    text = target.config.get(_TEXT)
    nested = isinstance(text, Mapping) and text.get(_DECLARATION) is not None
    if nested or target.config.get(_ELSEWHERE) is not None:
        where = f"{_TEXT}.{_DECLARATION}" if nested else _ELSEWHERE
        raise CheckpointError(
            target.folder / CONFIG_FILE,
            f"declares its quantization in {where}",
            fix=f"move it to {_DECLARATION}, where engines read it first",
        )


def declared_documents(
    target: Checkpoint, config: Mapping[str, Any], raw: RawDeclaration | None, merged: Merged | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json with the merged declaration.

    ModelOpt's nested form stays nested, wherever it stands.

    Returns:
        config.json, and the side file; None where the target has none.
    """
    side_path = target.folder / HF_QUANT_CONFIG
    side = read_json_object(side_path, "export it again") if side_path.is_file() else None
    if merged is None:
        return dict(config), side
    if raw is None or raw.form == "flat":
        new = {**config, _DECLARATION: merged.value}
        return new, _nested(side, merged.value) if side is not None else None
    if raw.form == "nested":
        new = {**config, _DECLARATION: _nested(config[_DECLARATION], merged.value)}
        return new, _nested(side, merged.value) if side is not None else None
    return dict(config), _nested(side or {}, merged.value)


def _nested(declared: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    inner = declared.get(_NESTED)
    if not isinstance(inner, Mapping):
        return {**declared}
    own = {key: value[key] for key in (*inner, "quantized_layers") if key in value}
    return {**declared, _NESTED: {**inner, **own}}


def index_text(
    target: Checkpoint, weight_map: Mapping[str, str], nbytes: int, parameters: int | None
) -> str:
    """The index: the target's with the layer's files, and what it counts counted again.

    Args:
        parameters: that come in addition, where the target's index counts them; None = not known.
    """
    metadata = dict((target.index or {}).get("metadata") or {})
    metadata["total_size"] = nbytes
    counted = metadata.pop("total_parameters", None)
    if type(counted) is int and parameters is not None:
        metadata["total_parameters"] = counted + parameters
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json_texts({INDEX_FILE: index})[INDEX_FILE]
