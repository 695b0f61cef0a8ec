"""What engines make of keys of config.json that are null, where that is not a key left out.

Executed with vLLM 0.33.0 and SGLang 0.5.23, and of the types that are not in the rows read: the
fields of every config class of Transformers 5.20.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from .contract import Question
from .engine import Engine
from .parameters import BIAS_KEYS

_FIELD = (
    "StrictDataclassFieldValidationError: Validation error for field '{0}': TypeError: Field '{0}'"
    " expected {1}, got NoneType (value: None)"
)
_OF_EVERY_CLASS = {
    "hidden_act": "str",
    "initializer_range": "float",
    "max_position_embeddings": "int",
    "tie_word_embeddings": "bool",
    "use_cache": "bool",
}
_LATENT = {"attention_bias": "bool"}
_OF_CLASSES: Mapping[str, Mapping[str, str]] = {
    "llama": {"attention_bias": "bool", "mlp_bias": "bool"},
    "qwen3": {
        "attention_bias": "bool",
        "attention_dropout": "float",
        "head_dim": "int",
        "max_window_layers": "int",
        "use_sliding_window": "bool",
    },
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
}
"""model_type -> fields of its class that take no null, and their type."""
NULL_BASE = "TypeError: unsupported operand type(s) for ** or pow(): 'NoneType' and 'Tensor'"
"""Of a rope_theta."""
_AUX = "use_aux_hidden_state"
_NO_ITEMS = "TypeError: argument of type 'NoneType' is not iterable"


def null_findings(engine: Engine, question: Question, *, has_class: bool) -> Iterator[Finding]:
    """Why an engine refuses nulls, or takes one for what is not meant.

    Args:
        engine: which.
        has_class: a class of Transformers reads the config.json, as of speculators none does.
    """
    config = question.config
    nulls = [key for key, value in config.items() if value is None]
    own = _OF_CLASSES.get(str(config.get("model_type")), {})
    for key in nulls:
        if (kind := {**_OF_EVERY_CLASS, **own}.get(key)) and has_class:
            yield Finding("config", _FIELD.format(key, kind), _remove(key))
        elif key in BIAS_KEYS and has_class and not own:
            what = f"What model_type {config.get('model_type')} makes of a null {key}"
            yield Finding("unknown", f"{what} was never executed", _remove(key))
        elif key == "auto_map":
            yield Finding("config", _NO_ITEMS, _remove(key))
        elif (error := engine.config.null_errors.get(key)) and (
            question.traits.drafts_blocks or not key.endswith("_config")
        ):
            yield Finding("init", error, _remove(key))
    nested: Any = config.get("eagle_config")
    if question.fuses and isinstance(nested, Mapping) and None is nested.get(_AUX, True):
        text = f"{engine.title} takes a null {_AUX} for false, and serves the draft without its fc"
        yield Finding("wrong", text, f"set {_AUX} of eagle_config to true")


def _remove(key: str) -> str:
    return f"remove {key} from config.json, or give its value"
