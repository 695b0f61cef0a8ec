"""Keys that a config.json lacks, and that the config class of its model_type fills in.

Both engines build drafts from the attributes of that class. The rows of config_defaults.json are
those of transformers 5.23.0 for language models, and of each engine's own classes where these
differ, with the transformers version that it pins (vLLM 0.33.0 admits at most 5.20.2, SGLang 0.5.23
wants 5.19.0). `scripts/dev/config_defaults.py` generates them.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..files.checkpoint import read_json_object

Source = Literal["vllm", "sglang"]
_FILE = Path(__file__).parent / "config_defaults.json"
_NOT_COMPUTED = frozenset({"attention_bias", "mlp_bias", "hidden_act", "tie_word_embeddings"})
"""Keys that engines use and no family computes with: a draft is read without their defaults."""
_NO_DEFAULTS = ("lacks", "changes", "unclear")


class ClassDefaults(NamedTuple):
    """What one config class fills in.

    Attributes:
        values: key -> its default, where that is not Llama's.
        lacks: keys for which it has no default.
        changes: key whose given value it changes -> the new value; None = it depends.
        unclear: keys whose default is not known here.
    """

    values: Mapping[str, Any]
    lacks: frozenset[str]
    changes: Mapping[str, Any]
    unclear: frozenset[str]

    def without(self, keys: frozenset[str]) -> "ClassDefaults":
        """The same for a draft in which nobody reads these keys."""
        values, changes = (
            {key: value for key, value in of.items() if key not in keys}
            for of in (self.values, self.changes)
        )
        return ClassDefaults(values, self.lacks - keys, changes, self.unclear - keys)


Row = ClassDefaults | Literal["unknown", "refused"]
"""The row of a model_type: "unknown" = there is no such class, "refused" = it takes no draft, or is
unlike those of all known drafts."""


def class_defaults(model_type: Any, engine: Source | None = None) -> Row:
    """The defaults of a model_type, of any JSON type, as an engine's classes read it.

    Without an engine: those of transformers, or of the first engine that has the type.
    """
    if not isinstance(model_type, str):
        return "unknown"
    places = ("transformers", "vllm", "sglang") if engine is None else (engine, "transformers")
    tables = [_rows()[place] for place in places]
    row: Any = next((rows[model_type] for rows in tables if model_type in rows), False)
    if row is False:
        return "unknown"
    if row is None:
        return "refused"
    return ClassDefaults(
        values={key: value for key, value in row.items() if key not in _NO_DEFAULTS},
        lacks=frozenset(row.get("lacks", ())),
        changes=row.get("changes", {}),
        unclear=frozenset(row.get("unclear", ())),
    )


def absent_keys(config: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The keys that a config.json lacks, with the values that its class gives them."""
    if isinstance(row, str):
        return {}
    absent = {key: value for key, value in row.values.items() if key not in config}
    if config.get("rope_scaling"):  # this replaces all of them
        absent.pop("rope_parameters", None)
    layers, cycle = config.get("num_hidden_layers"), row.values.get("layer_types")
    absent.pop("layer_types", None)
    if cycle and config.get("layer_types") is None and type(layers) is int:
        absent["layer_types"] = [cycle[i % len(cycle)] for i in range(min(max(layers, 0), 1024))]
    return absent


def in_place_of(config: Mapping[str, Any], keys: str) -> str:
    """What a class filled in for the keys that a text names, for a sentence; "" = nothing."""
    filled = {key: value for key, value in as_read(config).items() if key not in config}
    given = " and ".join(
        f"{key} {json.dumps(filled[key])}" for key in filled if re.search(rf"\b{key}\b", keys)
    )
    sentence = f"config.json has none: model_type {config.get('model_type')} gives {given}"
    return sentence if given else ""


def as_read(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with the keys that its class fills in, as far as families compute with them.

    Keys of a text_config are filled in there, by the class of its own model_type.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": as_read(text)}
    absent = absent_keys(config, class_defaults(config.get("model_type")))
    return {**config, **{k: v for k, v in absent.items() if k not in _NOT_COMPUTED}}


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    """Where classes come from -> model_type -> its row; false = that place has no such class."""
    tables = read_json_object(_FILE, "install draftquant again")
    return {
        place: {name: row for names, row in table["rows"] for name in names}
        for place, table in tables.items()
    }
