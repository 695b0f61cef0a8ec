"""What engines make of config.json: its class in Transformers, nulls, and the captured layers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..drafts import Family
from ..drafts.architectures import declared_architecture
from ..drafts.config_defaults import Source, absent_keys, class_defaults
from ..drafts.config_reader import KEY, SECTION, layers_in_both_places, object_at
from ..drafts.engine_traits import EngineTraits, Finding
from ..drafts.rope import declared
from .contract import TRY, Captures, Question
from .engine import TRAITS, Engine

_OWN_TYPES = {name: remedy for traits in TRAITS for name, remedy in traits.own_types.items()}
_OF_MTP = frozenset().union(
    *(in_engine.architectures for t in TRAITS if t.is_mtp for in_engine in (t.vllm, t.sglang))
)
_OF_DRAFTS = {
    name: traits
    for traits in TRAITS
    if traits.usual_type
    for name in (traits.vllm.architectures | traits.sglang.architectures) - _OF_MTP
}
"""Architecture of drafts other than MTP layers -> what engines know of that draft."""
_OF_HEADS = frozenset({"head_dim", "num_key_value_heads"})
"""Keys that nobody reads for MLA."""
_NEEDED_BY_BOTH = frozenset({"hidden_act", "rms_norm_eps"})
"""Attributes that vLLM reads too: it takes as many key heads as heads, and no tied head."""
_MORE_TYPES_THAN_LAYERS = frozenset().union(*(traits.more_types_than_layers for traits in TRAITS))


def draft_traits(config: Mapping[str, Any]) -> EngineTraits | None:
    """Traits of a draft with its own config.json; None for MTP layers and whole models."""
    return _OF_DRAFTS.get(declared_architecture(config))


def as_class_reads(config: Mapping[str, Any], asked: Engine) -> Mapping[str, Any] | Finding:
    """A draft's config.json with what the class of its model_type fills in, or why it is refused.

    That of MTP layers and whole models is returned unchanged. Source: executed with keys left out,
    for the types of `experiments/engines/names.json`.
    """
    engine: Source = "vllm" if asked.name == "vllm" else "sglang"
    traits, model_type = draft_traits(config), config.get("model_type")
    row = class_defaults(model_type, engine) if traits else None
    of_type = _OWN_TYPES.get(model_type) if isinstance(model_type, str) else None
    if of_type or (row == "unknown" and "auto_map" not in config):
        usual = traits and traits.usual_type
        remedy = of_type or f"set model_type to {usual}"
        if model_type == usual:
            remedy = "serve it with vLLM, which has a class of its own for that model_type"
        return asked.rule("unread_class", model_type=model_type, remedy=remedy) or config
    if (problem := _size_problem(config, asked)) is not None or traits is None or row is None:
        return problem or config
    usual, remedy = traits.usual_type, TRY
    if model_type != usual:
        remedy = f"set model_type to {usual}, whose layers the draft has"
    text = f"Loading such a draft of model_type {model_type} was never executed"
    unread = Finding("unknown", text, remedy)
    if isinstance(row, str):
        return unread
    if traits.latent:
        row = row.without(_OF_HEADS)
    if model_type == usual:  # what such a class makes of the rope its family says
        row = row.without(frozenset({"rope_parameters"}))
    read = {**config, **absent_keys(config, row), **row.changes}
    needed = {key for key in row.lacks if engine == "sglang" or key in _NEEDED_BY_BOTH}
    is_unread = (  # the class has what Llama's layers lack, or lacks what engines read
        None in row.changes.values()
        or read.get("hidden_act", "silu") != "silu"
        or (needed | row.unclear) - config.keys()
    )
    return unread if is_unread else read


def _size_problem(config: Mapping[str, Any], asked: Engine) -> Finding | None:
    model_type = config.get("model_type")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # not a draft
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    listed = len(types) if isinstance(types, list) and type(layers) is int else layers
    more = model_type in tuple(_MORE_TYPES_THAN_LAYERS)  # of any JSON type
    facts = {"columns": hidden, "heads": heads, "layers": layers, "listed": listed}
    uneven = model_type == "llama" and hidden % heads != 0
    differs = listed != layers and not more
    return asked.rule("sizes", is_uneven=uneven, is_other_number=differs, **facts)


# ---- The rope of a draft that is no MTP layer

_ORIGINAL = "original_max_position_embeddings"
_ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL),
    "mrope": ("mrope_section",),
    "yarn": ("factor", _ORIGINAL),
}
"""Each type that was executed, with the keys that it needs."""


def rope_problem(question: Question, engine: Engine) -> Finding | None:
    """That a rope is of another form than those that were executed."""
    rope, traits, config = declared(question.config), question.traits, question.config
    keys, kind, in_vllm = rope.keys, rope.keys["rope_type"], engine.name == "vllm"
    sections = keys.get("mrope_section")
    mixed = sum(part for part in sections if type(part) is int) if type(sections) is list else None
    plain = not (question.is_latent or traits.drafts_blocks or traits.whole_model)
    types = ("default", "mrope") if kind == "default" else (kind,)
    needed = _ROPES.get(str(kind))  # of any JSON type
    if in_vllm and question.is_latent and needed and "factor" in needed:
        needed = _ROPES["yarn"]  # which it takes every scaling for

    def rotated_pairs() -> int:
        name = "qk_rope_head_dim" if question.is_latent else "head_dim"
        width = config.get(name) or config["hidden_size"] // config["num_attention_heads"]
        part = int(width * keys.get("partial_rotary_factor", 1))
        return int(keys.get("rope_dim") or part) // 2

    if (
        (not rope.by_layer or (in_vllm and traits.vllm.rope_by_layer))
        and needed is not None
        and not any(keys.get(key) is None for key in needed)
        and keys.get("rope_theta", 0) is not None
        and keys.get("type", kind) in types
        and (kind != "mrope" or in_vllm or plain)
        and not (in_vllm and mixed not in (None, rotated_pairs()))
    ):
        return None
    clear = rope.by_layer and rope.is_clear
    remedy = f"write rope_parameters {json.dumps(keys)}, as quantize --fix-config does"
    return engine.rule("rope", place=rope.place, kind=kind, remedy=remedy if clear else TRY)


# ---- the layers that an engine passes to a draft, counted as "input of layer k" as vLLM does

DFLASH_SECTION, DFLASH_KEY = "dflash_config", "target_layer_ids"
_WIDTH = "target_hidden_size"


def as_built(
    engine: Engine, family: Family, geometry: Any, config: Mapping[str, Any]
) -> Any | Finding:
    """A geometry with fc, and the norms of EAGLE-3.1 before it, as an engine builds them."""
    if not geometry.fuses:
        return geometry
    in_engine = engine.own(family.engine_traits)
    fusion = (geometry.normed_heads and in_engine.normed_fusion) or in_engine.fusion
    if fusion is not None:
        width = geometry.target_hidden_size if fusion.reads_width else geometry.hidden_size
        is_null = fusion.reads_width and fusion.refuses_null and config.get(_WIDTH, 0) is None
        count = fusion.num_layers(config) if fusion.counted_by else geometry.num_aux_layers
        if is_null or count != geometry.num_aux_layers:
            what = "An fc of another size than the layers in config.json ask for was never executed"
            return Finding("unknown", what, TRY)
        geometry = replace(geometry, target_hidden_size=width)
    if not hasattr(geometry, "fc_norm"):
        return geometry
    before = {**config, **object_at(config, SECTION)}.get("norm_before_fc", False)
    return replace(
        geometry,
        norm_before_fc=bool(before) and family.engine_traits.norm_before_fc,
        fc_norm=any(bool(config.get(key)) for key in engine.fc_norm_keys),
    )


def misread_layers(
    engine: str, inputs: Captures, after: Sequence[int] | None, num_target_layers: int | None
) -> str | None:
    """Where an engine captures other layers than the draft reads; None where it does not.

    Args:
        after: the draft's layers, counted "after layer k"; None = the default, whatever it is.
        num_target_layers: None = not known; then ids that are the default of some target are
            taken for that target's.
    """
    if inputs == ():
        return f"{engine} captures no layer for an empty list, and fails when it serves"
    if after is None:
        return None
    read = [layer + 1 for layer in after]
    depth = num_target_layers or read[-1] + 3
    captured = list((2, depth // 2, depth - 3) if inputs is None else inputs)
    if sorted(set(captured)) == read:
        return None
    unknown = inputs is None and num_target_layers is None
    which = "2, L/2 and L - 3 of L" if unknown else str(captured)
    return (
        f"{engine} hands the draft the inputs of the target's layers {which}"
        f"{', its default' if inputs is None else ''}, and the draft was trained on the inputs of"
        f" layers {read}{'' if len(captured) == len(read) else ': it fails when it serves'}"
    )


def remedy_of_layers(config: Mapping[str, Any], after: tuple[int, ...] | None) -> str:
    """What config.json must say so that every engine captures the layers that the draft reads."""
    if after is None:
        return f"set {KEY} in {SECTION} of config.json to null, which means the default layers"
    if any(config.get(key) for key in (DFLASH_SECTION, DFLASH_KEY)):
        return (
            f"remove {KEY} and {SECTION} from the top level of config.json: the layers of a block"
            f" draft stand in {DFLASH_SECTION}.{DFLASH_KEY}"
        )
    inputs, nested = layers_in_both_places(after, config)
    return f"set {KEY} in config.json to {inputs} at the top level, and to {nested} in {SECTION}"


def layer_ids(value: object, *, plus: int = 0) -> tuple[int, ...] | None:
    """A list of layers; the family's reader refuses other values."""
    listed = value if isinstance(value, list | tuple) else ()
    ids = tuple(i + plus for i in listed if type(i) is int)
    return ids if ids and len(ids) == len(listed) else None
