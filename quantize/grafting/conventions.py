"""How each tool declares a target, and a layer in another format, in one config.json."""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...recipes.errors import LayoutError
from ..drafts.engine_traits import fused_names
from ..stored.layouts.module_patterns import PatternProblem, matches
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_declaration import RawDeclaration, read_scheme
from .grafted_layer import GraftedLayer

_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One quantization_config for both; `cannot` says why an engine cannot take the layer."""

    value: dict[str, Any]
    cannot: Mapping[str, str]


def merged_declaration(raw: RawDeclaration | None, layer: GraftedLayer) -> Merged | None:
    """One declaration for both; None where neither has a quantized linear."""
    if raw is None:
        if layer.declared is None:
            return None
        if layer.method != _COMPRESSED_TENSORS:
            raise LayoutError(
                "graft",
                f"the target is unquantized, and in layout {layer.method} a declaration cannot"
                " mean the layer alone",
                fix="draftquant transcode LAYER --layout compressed-tensors, where linears are"
                " declared by name",
            )
        return _in_groups(None, layer)
    method = str(raw.value.get("quant_method"))
    if method not in _BY_METHOD:
        raise LayoutError(
            "graft",
            f"the target's quant_method is {method!r}, whose way to declare one layer is not known"
            " here",
            fix=f"known are {', '.join(sorted(_BY_METHOD))}",
        )
    if layer.declared is not None and layer.method != method:
        raise LayoutError(
            "graft",
            f"the target's quant_method is {method!r}, the layer's {layer.method!r}: a config.json"
            " has one, by which engines read all linears",
            fix=f"draftquant transcode LAYER --layout {method} where the format allows it,"
            " quantize the layer with a recipe of that layout, or graft it unquantized",
        )
    if layer.format is not None and method != _COMPRESSED_TENSORS:
        _check_one_format(read_scheme(raw, strictness="engine"), layer.format, layer)
    return _BY_METHOD[method](raw.value, layer)


def _check_one_format(target: DeclaredScheme, grafted: DeclaredScheme, layer: GraftedLayer) -> None:
    """For a tool that declares one format for all linears, and one for the KV cache."""
    if grafted.kv_cache not in (None, target.kv_cache):
        raise _other_cache()
    there, here = (replace(each, excludes=(), kv_cache=None) for each in (target, grafted))
    if there != here:
        raise LayoutError(
            "graft",
            f"the target declares {there}, and its tool has one format for all linears; the layer"
            f" is stored as {layer.scheme}",
            fix=f"quantize the layer with a recipe of that format in layout {layer.method}, or"
            " graft it unquantized",
        )


def _other_cache() -> LayoutError:
    return LayoutError(
        "graft",
        "the layer declares a quantized KV cache (kv_cache_scheme), and the target another one or"
        " none: one config.json has one for all layers",
        fix="quantize the layer without kv_cache, and give the engine the dtype of the draft's"
        " cache on its command line",
    )


def _same_names(layer: GraftedLayer) -> dict[str, str]:
    what = (
        "it asks for this layer's linears by the names of a layer of the target, so that no"
        " declaration can tell them apart"
    )
    return {engine: what for engine, names in layer.names.engines.items() if names is None}


def _leaves_of(layer: GraftedLayer, modules: Iterable[str]) -> tuple[str, ...]:
    named = {name for module in modules for name in (module, *fused_names(module))}
    return tuple(sorted({layer.names.relative(name).rpartition(".")[2] for name in named}))


def _told_apart(layer: GraftedLayer, modules: Collection[str], others: Collection[str]) -> bool:
    return not set(_leaves_of(layer, modules)) & set(_leaves_of(layer, others))


def _patterns_of(layer: GraftedLayer, modules: Sequence[str]) -> list[str]:
    """Patterns for some linears of the layer; no name of the target begins as they do."""
    others = [name for name in (*layer.quantized, *layer.kept) if name not in modules]
    begin = f"re:{layer.names.pattern}"
    if _told_apart(layer, modules, others):
        return [f"{begin}(?:.*\\.)?{re.escape(leaf)}$" for leaf in _leaves_of(layer, modules)]
    names = (name for module in modules for name in (module, *fused_names(module)))
    paths = {layer.names.within_layer(name) for name in names}
    return [f"{begin}{re.escape(path)}$" for path in sorted(paths)]


def _float_patterns(layer: GraftedLayer) -> list[str]:
    if layer.declared is None:
        return [f"re:{layer.names.pattern}"]
    return _patterns_of(layer, layer.kept) if layer.kept else []


def _excludes_without(old: Iterable[object] | None, layer: GraftedLayer) -> list[str]:
    """The target's excludes without names of the layer; patterns that mean it exclude it."""
    names = layer.quantized_names
    pattern = layer.names.pattern
    excludes = []
    for entry in map(str, old or ()):
        if entry.startswith(f"re:{pattern}"):
            continue  # from an earlier graft
        if not any(_means(entry, name) for name in names):
            excludes.append(entry)
        elif entry.startswith("re:"):
            excludes.append(f"re:(?!{pattern})(?:{entry[3:]})")
    return excludes


def _means(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return matches(target[3:], module)
    except PatternProblem as exc:
        raise LayoutError(
            "graft",
            f"{target!r} in a quantization_config is no pattern that can be decided: {exc}",
            fix="write it as a plain regular expression, or as names",
        ) from exc


# ---- compressed-tensors: the layer's group before the target's groups, and excludes of the layer

_COMPRESSED_TENSORS = "compressed-tensors"
_MIXED, _PACKED = "mixed-precision", "pack-quantized"
_CLASS = "Linear"


def _in_groups(target: Mapping[str, Any] | None, layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer in it; without one, a declaration of only the layer.

    Both engines match a linear's name first, in the order of the groups, and its class last
    (`find_matched_target`; executed, `engines/graft.json`). Excludes precede all groups.
    """
    old = dict(target or {**(layer.declared or {}), "config_groups": {}, "ignore": []})
    cache = (layer.declared or {}).get("kv_cache_scheme")
    if cache is not None and cache != old.get("kv_cache_scheme"):
        raise _other_cache()
    begin = f"re:{layer.names.pattern}"
    of_target = {
        name: {**group, "format": group.get("format") or old.get("format")}
        for name, group in old.get("config_groups", {}).items()
        if not all(str(each).startswith(begin) for each in group["targets"])  # an earlier graft's
    }
    groups: dict[str, Any] = {
        _free(f"mtp_{i}", of_target): {**group, "targets": _patterns_of(layer, modules)}
        for i, (group, modules) in enumerate(_own_groups(layer))
    }
    groups |= of_target
    excludes = _excludes_without(old.get("ignore"), layer)
    only_layer = [] if target is not None else [f"re:(?!{layer.names.pattern})"]
    value = {
        **old,
        "config_groups": groups,
        "format": _whole_format({group["format"] for group in groups.values()}, layer),
        "ignore": [*only_layer, *excludes, *_float_patterns(layer)],
    }
    return Merged(value=value, cannot=_only_some_engines(excludes, layer) | _same_names(layer))


def _only_some_engines(excludes: Iterable[str], layer: GraftedLayer) -> dict[str, str]:
    """Why SGLang cannot take the layer: it matches names with the ends of others, vLLM does not.

    Neither a name nor a pattern means the same of the target's linears to both.
    """
    names = layer.quantized_names
    ends = {name[i + 1 :] for name in names for i, sign in enumerate(name) if sign == "."}
    hit = next((entry for entry in excludes if entry in ends and entry not in names), None)
    if hit is None:
        return {}
    return {"sglang": f"the target's exclude {hit!r} means quantized linears of the layer there"}


def _whole_format(forms: set[str], layer: GraftedLayer) -> str:
    """SGLang takes packed experts only in this form: `compressed_tensors_wNa16_moe.py:84`."""
    if len(forms) == 1:
        return next(iter(forms))
    experts = any(_EXPERTS in module for module in (*layer.quantized, *layer.kept))
    return _PACKED if experts and _PACKED in forms else _MIXED


def _own_groups(layer: GraftedLayer) -> list[tuple[dict[str, Any], list[str]]]:
    if layer.declared is None:
        return []
    usual = layer.declared.get("format")
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for module in layer.quantized:
        name, group = _group_of(layer.declared["config_groups"], module)
        empty = ({**group, "format": group.get("format") or usual}, list[str]())
        groups.setdefault(name, empty)[1].append(module)
    return [groups[name] for name in layer.declared["config_groups"] if name in groups]


def _group_of(groups: Mapping[str, Any], module: str) -> tuple[str, Mapping[str, Any]]:
    for name, group in groups.items():
        if any(_means(str(target), module) for target in group["targets"]):
            return name, group
    return next((name, group) for name, group in groups.items() if _CLASS in group["targets"])


def _free(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)


# ---- ModelOpt: one algorithm for all linears, and wildcards for unquantized ones

_MODELOPT = "modelopt"
_WILDCARDS = ("exclude_modules", "ignore")


def _in_wildcards(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    value = dict(target)
    for key in [key for key in _WILDCARDS if isinstance(target.get(key), list)] or _WILDCARDS[:1]:
        old = [str(entry) for entry in target.get(key) or ()]
        value[key] = list(dict.fromkeys([*_wildcards_left(old, layer), *_float_wildcards(layer)]))
    return Merged(value=value, cannot=_same_names(layer))


def _wildcards_left(old: list[str], layer: GraftedLayer) -> list[str]:
    kept = []
    for entry in old:
        if not any(entry in n or fnmatch.fnmatch(n, entry) for n in layer.quantized_names):
            kept.append(entry)
        elif not layer.names.contains(entry.rstrip("*.")):
            raise LayoutError(
                "graft",
                f"the target's exclude {entry!r} means quantized linears of the layer as well, and"
                " a wildcard cannot except them",
                fix="name the target's own modules there, or graft the layer unquantized",
            )
    return kept


def _float_wildcards(layer: GraftedLayer) -> list[str]:
    starts = layer.names.beginnings
    if layer.declared is None:
        return [f"{start}.*" for start in starts]
    if not _told_apart(layer, layer.kept, layer.quantized):
        names = (name for module in layer.kept for name in layer.names.everywhere(module))
        return list(dict.fromkeys(names))
    return [f"{start}.*{leaf}" for start in starts for leaf in _leaves_of(layer, layer.kept)]


# ---- Plain fp8: one format for all linears, and a list of unquantized ones

_FP8 = "fp8"
_FLOATS = ("ignored_layers", "modules_to_not_convert")
_ROOTS = frozenset({"model", "mtp"})
_NAMELESS = (
    "it gives this layer's linears no name of their own (self_attn.q_proj), and compares excludes"
    " with parts of names: it would take the target's for excluded as well"
)


def _in_list_of_floats(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer's linears taken from, or added to, the float list.

    VLLM compares whole names, SGLang parts of names between dots (`is_layer_skipped` of both).
    """
    keys = [key for key in _FLOATS if isinstance(target.get(key), list)] or [_FLOATS[1]]
    # Names that begin as no other linear's does, with the block of the routed experts for each.
    every = (name for module in layer.kept for name in layer.names.everywhere(module))
    kept = [_block(name) for name in every if name.partition(".")[0] in _ROOTS]
    names = set(layer.quantized_names)
    value = dict(target)
    for key in keys:
        old = [str(entry) for entry in target.get(key) or ()]
        left = [e for e in old if not layer.names.contains(e) or not _covers(e, names)]
        value[key] = list(dict.fromkeys([*left, *kept]))
    return Merged(value=value, cannot=_cannot(layer, value[keys[0]], names))


def _block(name: str) -> str:
    return f"{name.partition(_EXPERTS)[0]}{_EXPERTS.rstrip('.')}" if _EXPERTS in name else name


def _covers(entry: str, names: set[str]) -> bool:
    return any(f".{entry.rstrip('.')}." in f".{name}." for name in names)


def _cannot(layer: GraftedLayer, excludes: list[str], names: set[str]) -> dict[str, str]:
    reasons = _same_names(layer)
    hit = next((entry for entry in excludes if _covers(entry, names)), None)
    if hit is not None:
        reasons["sglang"] = f"the target's exclude {hit!r} means linears of the layer there"
    roots = layer.names.engines.get("sglang") or ()
    nameless = roots and not any(name.partition(".")[0] in _ROOTS for name in roots)
    if nameless and any(".self_attn." in name or ".mlp." in name for name in layer.kept):
        reasons["sglang"] = _NAMELESS
    return reasons


# ---- Quark: one format for all linears, and names or `re:` patterns of unquantized ones

_QUARK = "quark"


def _in_exclude(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    excludes = [*_excludes_without(target.get("exclude"), layer), *_float_patterns(layer)]
    return Merged(value={**target, "exclude": excludes}, cannot=_same_names(layer))


_BY_METHOD: Mapping[str, Callable[[Mapping[str, Any], GraftedLayer], Merged]] = {
    _COMPRESSED_TENSORS: _in_groups,
    _MODELOPT: _in_wildcards,
    _FP8: _in_list_of_floats,
    _QUARK: _in_exclude,
}
