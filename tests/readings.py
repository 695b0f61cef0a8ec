"""What is understood at each place of a declaration.

A place is refused with a sentence that lists what is understood there; each of these values is put
there, too, and what usually stands in for nothing. So every value that is read has a row, with what
it changes in the scheme, and whoever lets another key or value pass changes a row.
"""

import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftquant.quantize.stored.stored_declaration import (
    RawDeclaration,
    beside_codes,
    read_scheme,
    stored_parts,
)
from draftquant.recipes.errors import DeclarationError, LayoutError

HERE = Path(__file__).parent
ROOT = "quantization_config"
FORMS = {
    "quark": (1, 8, 24, 32, 36, "KV cache"),
    "compressed-tensors": (11, 15, 19, 20, 22, 23, "KV cache", "mixed"),
    "modelopt": (0, 1, 2, 3, "KV cache"),
    "fp8": (0, 1, 2, "KV cache"),
    "awq": (0,),
}
"""Of declarations.json: for each layout some, by position or name."""
OTHERS = (0, 3, 8, 12, 16)
"""Of other_tools.json."""
_RULES = {"-:.*fc": {}, "+:.*up_proj": {"bits": 8}, ".*down_proj": {"sym": False, "mse": 1}}
_OWN = {"fc": {"bits": 16}, "a.*b": {"bits": 8, "data_type": "int"}}
_FP8 = {"num_bits": 8, "type": "float"}
_GROUP = {
    "targets": ["Linear"],
    "weights": {**_FP8, "dynamic": False, "strategy": "channel"},
    "input_activations": {**_FP8, "dynamic": True, "strategy": "token"},
}
_ABSENT, _UNKNOWN = object(), {"no such": "value"}
_SHORT = {
    json.dumps({"same": "nothing"}): "anything",
    json.dumps({"or": "null", "same": "nothing null false [] {}"}): "null",
}
_TWICE = {"layer_quant_config", "*v_proj"}
"""What stands in them stands in others, too; and the methods are those of the first declaration."""
_TRUE = ("asymmetric", "ordered", "transposed", "scales_whole_matrix", "has_signed_scales")
_EMPTY = (_ABSENT, None, False, 0, [], {})
FOR_ENGINES = ("awq", "compressed-tensors, mixed", "fp8 in powers of two", "modelopt, KV cache")
"""Those whose names begin so are read for engines, too."""
Place = tuple[str, ...]
Reading = dict[str, Any]


def declarations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of our own layouts and of other tools, as they write them; and some that say more."""
    of_ours = json.loads((HERE / "declarations.json").read_text("utf-8"))
    for layout, forms in of_ours.items():
        for form in FORMS[layout]:
            name = form if isinstance(form, str) else list(forms)[form]
            yield f"{layout}, {name}", forms[name][0]
    of_modelopt = next(iter(of_ours["modelopt"].values()))[0]
    of_others = json.loads((HERE / "other_tools.json").read_text("utf-8"))
    names = [list(of_others)[number] for number in OTHERS]
    yield from ((name, of_others[name]["declared"]) for name in names)
    yield "gptq with rules", {**of_others[names[0]]["declared"], "dynamic": _RULES}
    yield "auto-round with others", {**of_others[names[2]]["declared"], "extra_config": _OWN}
    powers = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    yield "modelopt with groups", {**of_modelopt, "config_groups": {"group_0": _GROUP}}
    yield "fp8 in powers of two", {**powers, "weight_block_size": [64, 128]}


def read(declared: object, strictness: Any) -> Reading | DeclarationError:
    """The scheme, or why there is none."""
    where = Path("config.json")
    raw = RawDeclaration(value=declared, where=where, key=ROOT, form="flat", has_method=True)
    try:
        return read_scheme(raw, strictness=strictness).to_mapping()
    except DeclarationError as exc:
        return exc


def decoded(declared: Mapping[str, Any]) -> dict[str, Any]:
    """What its linears store, and how that is read."""
    where = Path("config.json")
    raw = RawDeclaration(value=declared, where=where, key=ROOT, form="flat", has_method=True)
    whole = read_scheme(raw, strictness="folder")
    found = {"scheme": str(whole), "JSON": whole.to_mapping()}
    for scheme in (dataclasses.replace(whole, others=()), *whole.others):
        layout, parts = scheme.layout, stored_parts(scheme, 72, 384, ("BF16",))
        facts = {
            "parts": {suffix: [*part] for suffix, part in parts.items()},
            "codes, scales": [layout.weight_suffix(scheme), layout.scale_suffix(scheme)],
            "zeros, beside": [layout.zeros(scheme), sorted(beside_codes(scheme))],
            "rows of a scale": scheme.rows_of_scale,
            "true": [name for name in _TRUE if getattr(scheme, name)],
            "rounded by others": layout.foreign_quotients_rounded(scheme),
        }
        with contextlib.suppress(LayoutError):
            facts["inputs"] = str(scheme.activation_format())
        found[" ".join(scheme.targets) or "all"] = facts
    heads = ("lm_head", "model.lm_head", "fc", "b.0")
    for what in ("is_excluded", "asks_for_head"):
        found[what] = [name for name in heads if getattr(whole, what)(name)]
    return found


def edited(value: Any, place: Place, to: object) -> Any:
    """A copy with something else at a place."""
    if not place:
        return to
    key, *inner = place
    if isinstance(value, list):
        at = int(key)
        return [*value[:at], edited(value[at], tuple(inner), to), *value[at + 1 :]]
    if to is _ABSENT and not inner:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: edited(value.get(key), tuple(inner), to)}


def standing(declared: Mapping[str, Any], place: Place) -> Any:
    """What stands at a place."""
    value: Any = declared
    for key in place:
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    return value


def places(declared: Mapping[str, Any], strictness: str, at: Place = ()) -> Iterator[Place]:
    """Every key of every object, and those that a refusal of an unknown key calls known."""
    value = standing(declared, at)
    refused = read(edited(declared, (*at, "unheard of"), 1), strictness)
    if isinstance(refused, dict):  # where any other key passes
        yield (*at, "unheard of")
    listed = str(refused).partition("(unknown key): understood are ")[2].partition(", got 1")[0]
    for key in sorted({*value, *filter(None, listed.split(" or "))} - {"unheard of"}):
        yield (*at, key)
        inner = value.get(key)
        if isinstance(inner, dict) and inner:
            yield from places(declared, strictness, (*at, key))
        for i, item in enumerate(inner if isinstance(inner, list) else ()):
            if isinstance(item, dict):
                yield from places(declared, strictness, (*at, key, str(i)))


def understood(refused: DeclarationError, place: Place) -> str:
    """What a refusal calls understood, if it is about this place; else the place that it names."""
    path = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join((ROOT, *place)))
    found = re.fullmatch(rf"{re.escape(path)}: understood (?:is|are) (.*), got .*", refused.what)
    return found[1] if found else f"-> {refused.what.partition(':')[0].removeprefix(f'{ROOT}.')}"


def literals(said: str) -> Iterator[Any]:
    for one in said.split(" or "):
        try:
            yield ast.literal_eval(one)
        except (SyntaxError, ValueError):
            continue  # in words


def reading(declared: Mapping[str, Any], strictness: str, place: Place) -> Reading | str:
    """What may stand at a place, and what it changes."""
    usual, found, same = read(declared, strictness), Reading(), list[str]()
    if not isinstance(usual, dict):
        return understood(usual, place)
    refused = read(edited(declared, place, _UNKNOWN), strictness)
    if isinstance(refused, DeclarationError):
        found["or"] = understood(refused, place)
        if (refused.fix or "").partition(",")[0] != "quantize again with a supported layout":
            found["fix"] = refused.fix
    values = [*_EMPTY, *literals(found.get("or", ""))] if found else [_ABSENT]
    made = {"nothing" if one is _ABSENT else json.dumps(one): one for one in values}
    if found and isinstance(own := standing(declared, place), list):
        made['["other"]'] = ["other"]
        if own and isinstance(own[0], dict):  # stages
            made |= {"one more": [*own, own[-1]], "without the first": own[1:], "turned": own[::-1]}
    for name, value in made.items():
        scheme = read(edited(declared, place, value), strictness)
        if isinstance(scheme, dict):
            keys = usual.keys() | scheme.keys()
            other = {k: scheme.get(k) for k in sorted(keys) if usual.get(k) != scheme.get(k)}
            if other:
                found[name] = other
            else:
                same.append(name)
        elif (named := understood(scheme, place)).startswith("->") and value is not _ABSENT:
            found[name] = named
    found["same"] = " ".join(dict.fromkeys(same))
    return _SHORT.get(json.dumps(found), found)


def readings() -> dict[str, dict[str, Any]]:
    """Declaration -> place -> what is understood there; for engines, which accept more, as well.

    "or": in words; "same": values that change nothing; value -> what it changes, or the place that
    is refused then.
    """
    rows = dict[str, dict[str, Any]]()
    for name, declared in declarations():
        found = {
            ".".join(place): reading(declared, "declaration", place)
            for place in places(declared, "declaration")
            if not _TWICE & {*place[:-1]} and (place != ("quant_method",) or not rows)
        }
        for place in places(declared, "engine") if name.startswith(FOR_ENGINES) else ():
            said = reading(declared, "engine", place)
            if said != found.get(key := ".".join(place)) and key != "quant_method":
                found[f"{key}, for engines"] = said
        anything = [place for place, said in found.items() if said == "anything"]
        rows[name] = {**decoded(declared), "anything": " ".join(anything)}
        rows[name] |= {place: said for place, said in found.items() if said != "anything"}
    return rows
