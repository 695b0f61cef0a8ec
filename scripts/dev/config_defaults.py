"""What the config class of each model_type fills in: quantize/drafts/config_defaults.json.

Usage: `python scripts/dev/config_defaults.py` prints transformers' values here; in the engines'
environments, with the transformers that each pins, `... vllm` and `... sglang` print those of
their own classes. `python scripts/dev/config_defaults.py TRANSFORMERS VLLM SGLANG`, given the three
outputs, writes the file.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "quantize" / "drafts" / "config_defaults.json"
ENGINES = ROOT / "experiments" / "engines"
REGISTRIES = {
    "vllm": "vllm.transformers_utils.config",
    "sglang": "sglang.srt.utils.hf_transformers.common",
}
"""Engine -> the module that has its own classes."""
FLAGS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
         "tie_word_embeddings": False}  # fmt: skip
PROBES: tuple[dict[str, Any], ...] = tuple(
    {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        **FLAGS,
        "rms_norm_eps": 2e-5,
        "rope_theta": 500.0,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_layer_ids": [1],  # without which K3DSparkConfig takes no draft
        "num_target_layers": 1,
    }
    for hidden, heads, head_dim in ((256, 8, 48), (384, 4, 40))
)
"""Two drafts, to separate what follows from the sizes from what does not."""
PLAIN = {**FLAGS, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
"""Marks a key that is absent from a row."""
LEFT_OUT = ("num_key_value_heads", "head_dim", "rms_norm_eps", *FLAGS)
UNREAD = ("rope_theta", "architectures", "max_position_embeddings")
"""Keys that may differ: no family reads them, or they have a rule of their own."""
OTHERS = ("sliding_window",)
ANSWERS = (ROOT / "tests" / "wild" / "drafts.json", *ENGINES.glob("*.json"))
DRAFTS = {n for f in ANSWERS for n in re.findall(r'"model_type": ?"(\w+)"', f.read_text("utf-8"))}
"""Types of drafts that are published, or that engines were asked for."""
MOST_KINDS = 6
"""The longest cycle of kinds of layers."""
NONE = object()
Ask = Callable[[Mapping[str, Any]], Any]


def row(config_class: Any, model_type: str) -> dict[str, Any] | None:
    """The defaults of one class that differ from the plain ones; None where no draft has it.

    "lacks": keys without a default. "changes": what becomes of keys that it does not keep as given;
    null = that depends, or is a size. "unclear": keys whose default follows from
    other keys in another way than in Llama. These three are its marks.
    """
    asked = cache(lambda text: attributes(config_class, json.loads(text)))

    def ask(given: Mapping[str, Any]) -> dict[str, Any]:
        return asked(json.dumps(given))

    full = [ask(probe) for probe in PROBES]
    if not all(full):
        return None
    found: dict[str, Any] = {key: full[0][key] for key in OTHERS if key in full[0]}
    lacks: list[str] = []
    changes = {
        key: full[0].get(key) if key in LEFT_OUT and full[0].get(key) == full[1].get(key) else None
        for key, value in PROBES[0].items()
        if key not in UNREAD and full[0].get(key) != value
    }
    unclear: list[str] = []
    for key in LEFT_OUT:
        first, second = (without(ask, probe, key).get(key, NONE) for probe in PROBES)
        if first is NONE and key not in ("head_dim", "attention_bias", "mlp_bias"):
            lacks.append(key)
        elif first != second and (first, second) != as_llama(key):
            unclear.append(key)
        elif first == second and first is not NONE and first != PLAIN.get(key, NONE):
            found[key] = first
    types = layer_types(ask)
    unclear += ["layer_types"] if types is None else []
    if types and "sliding_attention" in types:
        found["layer_types"] = types
    rope = rotation(full[0], without(ask, PROBES[0], "rope_theta"))
    if rope is None:
        changes |= {"rope_parameters": None} if is_nested(full[0]) else {}
        unclear += [] if is_nested(full[0]) else ["rope_parameters"]
    found |= rope or {}
    named = {"lacks": lacks, "changes": changes, "unclear": unclear}
    marks = {key: names for key, names in named.items() if names}
    return None if marks and model_type not in DRAFTS else found | marks


def attributes(config_class: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the requested keys in a config of these keys; {} = it is refused."""
    try:
        config = config_class.from_dict(dict(given))
    except Exception:  # noqa: BLE001  whatever a class raises, it takes no such draft
        return {}
    found = {}
    for key in (*PROBES[0], *OTHERS, "layer_types", "rope_parameters"):
        try:
            found[key] = getattr(config, key)
        except Exception:  # noqa: BLE001  an attribute that it lacks, or one for each layer
            continue
    return found


def without(ask: Ask, given: Mapping[str, Any], key: str) -> Any:
    """The answer for the same config without a key."""
    return ask({name: value for name, value in given.items() if name != key})


def as_llama(key: str) -> tuple[Any, Any]:
    """The default of both probes where it follows from the other keys as in Llama."""
    heads = [probe["num_attention_heads"] for probe in PROBES]
    if key == "num_key_value_heads":
        return heads[0], heads[1]
    sizes = [probe["hidden_size"] for probe in PROBES]
    return sizes[0] // heads[0], sizes[1] // heads[1]


def rotation(full: Mapping[str, Any], bare: Mapping[str, Any]) -> dict[str, Any] | None:
    """Base, rotated part and scaling; None where any of them is not unique.

    A base in rope_parameters is one that rope_theta of config.json does not change.
    """
    said, own = full.get("rope_parameters"), bare.get("rope_parameters")
    if said is None and own is None:
        return {}
    if not isinstance(said, Mapping) or not isinstance(own, Mapping) or "rope_theta" not in own:
        return None
    scaling = dict(own)
    found = {"partial_rotary_factor": scaling.pop("partial_rotary_factor", 1.0)}
    if said["rope_theta"] == PROBES[0]["rope_theta"]:
        found["rope_theta"] = float(scaling.pop("rope_theta"))
    if scaling.get("rope_type") != "default" or "rope_theta" in scaling:
        found["rope_parameters"] = scaling
    return {key: value for key, value in found.items() if value != PLAIN.get(key, NONE)}


def is_nested(full: Mapping[str, Any]) -> bool:
    """Whether each kind of layer has its own rotation."""
    said = full.get("rope_parameters")
    return isinstance(said, Mapping) and any(isinstance(each, Mapping) for each in said.values())


def layer_types(ask: Ask) -> list[str] | None:
    """The shortest list that repeats itself, [] = no list; None where it is not that simple."""
    lists = [
        ask({**PROBES[0], "num_hidden_layers": n}).get("layer_types") or [] for n in (1, 2, 5, 24)
    ]
    if not all(lists):
        return None if any(lists) else []
    for cycle in (lists[-1][:period] for period in range(1, MOST_KINDS + 1)):
        if all([cycle[i % len(cycle)] for i in range(len(each))] == each for each in lists):
            return cycle
    return None


def classes(engine: str | None) -> dict[str, Any]:
    """model_type -> the class that reads it; an engine's own takes precedence."""
    mapping: Any = importlib.import_module("transformers").CONFIG_MAPPING
    own: Any = {}
    if engine is not None:
        sys.path.insert(0, str(ENGINES))
        os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
        if engine == "sglang":
            importlib.import_module("sglang_platform").install("sm90")
        own = importlib.import_module(REGISTRIES[engine])._CONFIG_REGISTRY
    # Classes that other packages of this process have registered are not transformers' own.
    names = set(mapping.keys()) - set(mapping._extra_content)
    return {name: mapping[name] for name in filter(is_language_model, names)} | dict(own)


def is_language_model(model_type: str) -> bool:
    """Whether a draft can have the type: text goes on, and no encoder of images or sound does."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    known = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "step3p5"}
    known |= auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    return model_type in known or model_type.endswith("_text")


def answers(engine: str | None) -> dict[str, Any]:
    """The version of transformers here, and the row of every model_type."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    found = {n: row(each, n) for n, each in sorted(classes(engine).items())}
    return {"transformers": transformers.__version__, "types": found}


def text_of(here: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]]) -> str:
    """The file: all of transformers' rows, and for each engine those that differ.

    A row stands once, after the names of its types: false for those that an engine does not know.
    """
    merged: dict[str, Any] = {"transformers": here}
    for engine, said in engines.items():
        types = dict.fromkeys(here["types"], False) | said["types"]
        own = {
            name: found
            for name, found in sorted(types.items())
            if name not in here["types"] or found != here["types"][name]
        }
        merged[engine] = {"transformers": said["transformers"], "types": own}
    blocks = [
        f'"{name}": {{"transformers": {json.dumps(said["transformers"])}, "rows": [\n'
        + ",\n".join(f"[{json.dumps(names)}, {row}]" for row, names in grouped(said["types"]))
        + "\n]}"
        for name, said in merged.items()
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def grouped(types: Mapping[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """Each row as JSON, with the types that have it."""
    found: dict[str, list[str]] = {}
    for name, row_of_type in types.items():
        found.setdefault(json.dumps(row_of_type), []).append(name)
    return found.items()


def main(words: list[str]) -> None:
    """See the module."""
    if len(words) == 1 + len(REGISTRIES):
        here, *engines = (json.loads(Path(word).read_text(encoding="utf-8")) for word in words)
        OUT.write_text(text_of(here, dict(zip(REGISTRIES, engines, strict=True))), encoding="utf-8")
    else:
        print(json.dumps(answers(words[0] if words else None)))


if __name__ == "__main__":
    main(sys.argv[1:])
