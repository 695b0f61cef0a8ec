"""How Transformers refuses a config.json, before an engine asks what is in it."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts.architectures import declared_architecture
from ..drafts.config_defaults import ClassDefaults, Source, absent_keys, class_defaults
from ..drafts.engine_traits import EngineTraits, Finding
from .built_linears import BIAS_KEYS
from .contract import Question
from .engine import TRAITS, Engine

_NO_TYPE = (
    "The checkpoint you are trying to load has model type `{}` but Transformers does not"
    " recognize this architecture."
)
_INVALID = (
    "StrictDataclassClassValidationError: Class validation error for validator 'validate_{}':"
    " ValueError: {}"
)
NO_NAME = "config.json has no architectures, by which engines choose the model"
OF_LAYERS = "set model_type to that of the draft's layers, such as llama"
_WHOLE_HEADS = ("llama",)
"""model_type of which each head has hidden_size / num_attention_heads elements by default."""
_OWN_TYPES = {name: remedy for traits in TRAITS for name, remedy in traits.own_types.items()}
_OF_MTP = frozenset().union(
    *(own.architectures for t in TRAITS if t.is_mtp for own in (t.vllm, t.sglang))
)
_OF_DRAFTS = {
    name: traits
    for traits in TRAITS
    if traits.usual_type
    for own in (traits.vllm, traits.sglang)
    for name in own.architectures - _OF_MTP
}
"""Architecture that drafts have and no MTP layer -> what engines are told of such a draft."""
_OF_HEADS = frozenset({"head_dim", "num_key_value_heads"})
"""Keys that nobody reads of a latent attention."""
_EXECUTED = frozenset({
    "apertus", "arcee", "bamba", "cohere", "cohere2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm4", "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "kimi_k2", "lfm2", "llama", "llama4_text",
    "minimax_m2", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "step3p5",
})  # fmt: skip
"""Types of drafts that both engines were asked to load. Classes of other types have more of their
own than their defaults: sizes under other names (GPT-2), rotations of pictures."""
_NEEDED_BY_BOTH = frozenset({"hidden_act", "rms_norm_eps"})
"""Attributes that vLLM asks for, too: it takes as many key heads as heads, and no tied head."""
_MORE_TYPES_THAN_LAYERS = frozenset().union(*(traits.more_types_than_layers for traits in TRAITS))


def draft_traits(config: Mapping[str, Any]) -> EngineTraits | None:
    """Of a draft with a config.json of its own; None of MTP layers and of whole models alone."""
    return _OF_DRAFTS.get(declared_architecture(config))


def as_class_reads(
    config: Mapping[str, Any], engine: Source, text: str
) -> Mapping[str, Any] | Finding:
    """A draft's config.json with what the class of its model_type fills in, or why it is refused.

    Args:
        config: the parsed config.json; of MTP layers and whole models it is given back as it is.
        text: of its errors, with {}.

    Source: executed with keys left out, for the types of `tests/engines/names.py`.
    """
    traits, model_type = draft_traits(config), config.get("model_type")
    row = class_defaults(model_type, engine) if traits else None
    own = _OWN_TYPES.get(model_type) if isinstance(model_type, str) else None
    if own or (row == "unknown" and "auto_map" not in config):
        error = text.format(_NO_TYPE.format(model_type))
        return Finding("config", error, own or f"set model_type to {traits and traits.usual_type}")
    if (problem := _size_problem(config)) is not None or traits is None or row is None:
        return problem or config
    remedy = f"set model_type to {traits.usual_type}, whose layers the draft has"
    what = f"Loading such a draft of model_type {model_type} was never executed"
    unsure = Finding("unknown", what, remedy)
    if isinstance(row, str):
        return unsure
    if traits.latent:
        row = row.without(_OF_HEADS)
    read = {**config, **absent_keys(config, row), **row.changes}
    problem = next(_class_problems(config, read, row, f"{remedy}, or add {{}}", engine), None)
    return problem or (read if model_type in _EXECUTED else unsure)


def _class_problems(
    config: Mapping[str, Any],
    read: Mapping[str, Any],
    row: ClassDefaults,
    remedy: str,
    engine: Source,
) -> Iterator[Finding]:
    """What engines do not find in the class, or not as Llama's layers want it."""
    named = f"The config class of model_type {config['model_type']}"
    instead = remedy.partition(", or add")[0]
    if "rope_parameters" in row.changes:
        what = f"{named} has a rotation for each kind of layer [TypeError: unhashable type: 'dict']"
        yield Finding("init", what, instead)
    for key in (key for key, value in row.changes.items() if value is None):
        what = f"{named} has another {key} than config.json says"
        yield Finding("unknown", what, instead)
    if read.get("hidden_act", "silu") != "silu":
        error = f"ValueError: Unsupported activation: {read['hidden_act']}. Only silu is supported"
        yield Finding("init", f"{error} for now.", remedy.format("hidden_act silu"))
    for key in sorted(row.lacks - config.keys()):
        if engine == "sglang" or key in _NEEDED_BY_BOTH:
            error = f"{named} has no {key}, and config.json neither [AttributeError]"
            yield Finding("init", error, remedy.format(key))
    for key in sorted(row.unclear - config.keys()):
        what = f"{named} has a {key} that is not known here"
        yield Finding("unknown", what, remedy.format(key))


def _size_problem(config: Mapping[str, Any]) -> Finding | None:
    """Sizes at odds, which Transformers refuses.

    Source: `configuration_utils.py` and `configuration_llama.py` of Transformers 5.20, executed.
    """
    model_type = config.get("model_type")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # which is no draft
    if model_type in _WHOLE_HEADS and hidden % heads:
        what = f"The hidden size ({hidden}) is not a multiple of the number of attention heads"
        error = _INVALID.format("architecture", f"{what} ({heads}).")
        return Finding("config", error, "train the draft with another size")
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if model_type in tuple(_MORE_TYPES_THAN_LAYERS):  # of any JSON type
        return None
    if isinstance(types, list) and type(layers) is int and len(types) != layers:
        what = f"`num_hidden_layers` ({layers}) must be equal to the number of `layer_types`"
        error = _INVALID.format("layer_type", f"{what} ({len(types)})")
        return Finding("config", error, "correct num_hidden_layers, or layer_types")
    return None


# ---- What engines make of keys of config.json that are null, where that is not a key left out
#
# Executed with vLLM 0.33.0 and SGLang 0.5.23, and of the types that are not in the rows read: the
# fields of every config class of Transformers 5.20.

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
