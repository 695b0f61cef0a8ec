"""Which layers of the target an engine hands to a draft, against those that the draft reads.

And for how many of them, of which width, it builds the draft's fc.

Layers are counted as "input of layer k", as vLLM does. Which key of config.json is read depends on
the engine, and in vLLM on its model runner; ids in the wrong convention are read one layer off,
without an error: so served, the shipped EAGLE-3 pair accepts 2.00 tokens instead of 2.91.

Source: vLLM 0.33 `v1/worker/gpu_model_runner.py` (V1) and `v1/worker/gpu/spec_decode/eagle/
eagle3_utils.py` (V2); SGLang 0.5.23 `spec_aux_hidden_state.py`, `deepseek_v2.py`, `llama.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..drafts.config_reader import DEEPSEEK_TYPES, KEY, SECTION, layers_in_both_places
from ..drafts.engine_traits import Finding, Fusion

_DFLASH_SECTION, _DFLASH_KEY = "dflash_config", "target_layer_ids"
_WIDTH = "target_hidden_size"
_MOST_LAYERS = 1024
"""Of any target: fc and its norms are held against a table of so many."""


class Capture(NamedTuple):
    """What one model runner of an engine captures.

    Attributes:
        runner: which one, for a sentence.
        inputs: the layers whose inputs it captures; None = its default for the target, () = none.
    """

    runner: str
    inputs: tuple[int, ...] | None


Captures = tuple[Capture, ...]
"""Of the runner that is used by default, then of others."""


def vllm_captures(config: Mapping[str, Any], *, runs_v1: bool = True) -> Captures:
    """V2 runs by default; V1 where it is chosen, and where V2 cannot run, as on CPUs."""
    top = _ids(config.get(KEY))
    block = _plus_one(_ids(_section(config, _DFLASH_SECTION).get(_DFLASH_KEY)))
    listed = [_ids(_section(config, name).get("layer_ids")) for name in (_DFLASH_SECTION, SECTION)]
    second = [top, block, _plus_one(_ids(config.get(_DFLASH_KEY))), *listed]
    if not runs_v1:
        return (Capture("vLLM", next((ids for ids in second if ids), None)),)
    nested = _section(config, SECTION)
    first = top or (_ids(nested.get(KEY)) if nested else block)  # eagle_config hides dflash_config
    return (
        Capture("vLLM's V2 model runner", next((ids for ids in second if ids), None)),
        Capture("vLLM's V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0, or no Triton)", first),
    )


def sglang_captures(config: Mapping[str, Any]) -> Captures:
    """Nested ids only; for DeepSeek's and Kimi's targets they are inputs unless the first is 1."""
    own = _section(config, _DFLASH_SECTION)
    if block := _ids({**config, **own}.get(_DFLASH_KEY)):  # `dflash_utils.py:647`
        return (Capture("SGLang", _plus_one(block)),)
    section = _section(config, SECTION)
    if section.get(KEY) == []:  # `llama.py:941`: none, not the default
        return (Capture("SGLang", ()),)
    ids = _ids(section.get(KEY))
    as_inputs = config.get("model_type") in DEEPSEEK_TYPES and ids and ids[0] != 1
    return (Capture("SGLang", ids if as_inputs else _plus_one(ids)),)


def with_built_fc(fusion: Fusion, geometry: Any, config: Mapping[str, Any]) -> Any | Finding:
    """A geometry with fc as an engine sizes it by config.json, or its error."""
    changes = {} if fusion.reads_width else {_WIDTH: geometry.hidden_size}
    if fusion.null_width and fusion.reads_width and config.get(_WIDTH, 0) is None:
        return Finding("init", fusion.null_width, f"remove {_WIDTH} from config.json, or set it")
    if fusion.counted_by:
        count = fusion.num_layers(config)
        if not isinstance(count, int) or not 0 <= count <= _MOST_LAYERS:
            text = f"TypeError: empty(): argument 'size' got {count!r} for the number of layers"
            return Finding("init", text, "write num_aux_hidden_states as a whole number")
        changes["num_aux_layers"] = int(count)
    return replace(geometry, **changes)


def misread_layers(
    capture: Capture,
    after: Sequence[int] | None,
    num_target_layers: int | None,
    num_fused: int | None = None,
) -> str | None:
    """How a runner captures other layers than the draft reads; None where it does not.

    Args:
        after: the draft's layers, counted "after layer k"; None = the default, whatever it is.
        num_target_layers: None = not known; then ids that are the default of some target are
            taken for that target's.
        num_fused: for how many layers fc is built; None = for as many as the draft reads.
    """
    if capture.inputs == ():
        return f"{capture.runner} captures no layer for an empty list, and fails when it serves"
    count = 3 if capture.inputs is None else len(set(capture.inputs))
    if num_fused not in (None, count):
        return (
            f"{capture.runner} hands the draft {count} layers of the target, builds fc for"
            f" {num_fused}, and fails when it serves"
        )
    if after is None:
        return None
    read = [layer + 1 for layer in after]
    default = _default(num_target_layers or read[-1] + 3)
    captured = list(default if capture.inputs is None else capture.inputs)
    if sorted(set(captured)) == read:
        return None
    which = ", its default" if capture.inputs is None else ""
    known = capture.inputs is not None or num_target_layers is not None
    shown = str(captured) if known else "2, L/2 and L - 3 of L"
    return (
        f"{capture.runner} hands the draft the inputs of the target's layers {shown}{which}, and"
        f" the draft was trained on the inputs of layers {read}"
    )


def remedy_of_layers(config: Mapping[str, Any], after: tuple[int, ...] | None) -> str:
    """What config.json must say so that every runner captures the layers that the draft reads.

    Args:
        after: as of `misread_layers`.
    """
    if after is None:
        return f"set {KEY} in {SECTION} of config.json to null, which means the default layers"
    if any(config.get(key) for key in (_DFLASH_SECTION, _DFLASH_KEY)):
        return (
            f"remove {KEY} and {SECTION} from the top level of config.json: the layers of a block"
            f" draft stand in {_DFLASH_SECTION}.{_DFLASH_KEY}"
        )
    inputs, nested = layers_in_both_places(after, config)
    return f"set {KEY} in config.json to {inputs} at the top level, and to {nested} in {SECTION}"


def remedy_of_fc(config: Mapping[str, Any], fusion: Fusion, read: Any, built: Any) -> str:
    """What config.json must say so that an engine builds fc as it is stored."""
    from ..drafts.family import LAYER_CONFIG
    from ..drafts.recognition import is_speculators  # imports all families

    count = read.num_aux_layers
    if built.num_aux_layers == count:
        if built.target_hidden_size != read.target_hidden_size:
            return "serve it with vLLM"
        return f"correct the layers that config.json names, or {_WIDTH}, as the draft was trained"
    for key in fusion.counted_by:
        if config.get(key) not in (None, count) and type(config[key]) is not list:
            return f"set {key} in config.json to {count}, or remove it"
    if is_speculators(config):
        return f"write num_aux_hidden_states: {count} into {LAYER_CONFIG} of config.json"
    return remedy_of_layers(config, read.aux_layer_ids)


def _default(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _ids(value: object) -> tuple[int, ...] | None:
    """A list of layers; what else stands there the reader of the family refuses."""
    listed = value if isinstance(value, list | tuple) else ()
    return tuple(listed) if listed and all(type(i) is int for i in listed) else None


def _plus_one(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return tuple(i + 1 for i in ids) if ids else None
