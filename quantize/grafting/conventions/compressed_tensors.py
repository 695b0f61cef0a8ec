"""compressed-tensors: a group of the layer's own before the target's, and excludes of the layer.

Both engines look for a linear's name first, in the order of the groups, and for its class last
(`find_matched_target`; executed, `tests/engines/graft.py`). Excludes go before all groups.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ..grafted_layer import GraftedLayer
from .convention import EXPERTS, Merged, other_tool, refused, same_names
from .patterns import excludes_without, float_patterns, means, only_some_engines, patterns_of

METHOD = "compressed-tensors"
_MIXED, _PACKED = "mixed-precision", "pack-quantized"
_CLASS = "Linear"


def merged(target: Mapping[str, Any] | None, layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer in it; without one, a declaration of the layer alone.

    Raises:
        LayoutError: the layer's is another tool's, or says of the KV cache what the target does
            not, or an exclude of the target cannot be read.
    """
    if layer.declared is not None and layer.method != METHOD:
        raise other_tool(layer, METHOD)
    old = dict(target or {**(layer.declared or {}), "config_groups": {}, "ignore": []})
    _check_cache(old, layer.declared or {})
    begin = f"re:{layer.names.pattern}"
    of_target = {
        name: {**group, "format": group.get("format") or old.get("format")}
        for name, group in old.get("config_groups", {}).items()
        if not all(str(each).startswith(begin) for each in group["targets"])  # an earlier graft's
    }
    groups: dict[str, Any] = {
        _free(f"mtp_{i}", of_target): {**group, "targets": patterns_of(layer, modules)}
        for i, (group, modules) in enumerate(_own_groups(layer))
    }
    groups |= of_target
    excludes = excludes_without(old.get("ignore"), layer)
    only_layer = [] if target is not None else [f"re:(?!{layer.names.pattern})"]
    value = {
        **old,
        "config_groups": groups,
        "format": _whole_format({group["format"] for group in groups.values()}, layer),
        "ignore": [*only_layer, *excludes, *float_patterns(layer)],
    }
    return Merged(value=value, cannot=only_some_engines(excludes, layer) | same_names(layer))


def _whole_format(forms: set[str], layer: GraftedLayer) -> str:
    """What stands for the formats of all groups, each of which has its own beside it.

    SGLang takes packed experts under this one alone: `compressed_tensors_wNa16_moe.py:84`.
    """
    if len(forms) == 1:
        return next(iter(forms))
    experts = any(EXPERTS in module for module in (*layer.quantized, *layer.kept))
    return _PACKED if experts and _PACKED in forms else _MIXED


def _check_cache(target: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    own, whole = layer.get("kv_cache_scheme"), target.get("kv_cache_scheme")
    if own is not None and own != whole:
        raise refused(
            "the layer declares a quantized KV cache (kv_cache_scheme), and the target another one"
            " or none: one config.json has one for all layers",
            fix="quantize the layer without kv_cache, and give the engine the dtype of the draft's"
            " cache on its command line",
        )


def _own_groups(layer: GraftedLayer) -> list[tuple[dict[str, Any], list[str]]]:
    """The groups of the layer's folder that hold one of its linears, each with those."""
    if layer.declared is None:
        return []
    usual = layer.declared.get("format")
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for module in layer.quantized:
        name, group = _group_of(layer.declared["config_groups"], module)
        empty = ({**group, "format": group.get("format") or usual}, list[str]())
        found.setdefault(name, empty)[1].append(module)
    return [found[name] for name in layer.declared["config_groups"] if name in found]


def _group_of(groups: Mapping[str, Any], module: str) -> tuple[str, Mapping[str, Any]]:
    for name, group in groups.items():
        if any(means(str(target), module) for target in group["targets"]):
            return name, group
    return next((name, group) for name, group in groups.items() if _CLASS in group["targets"])


def _free(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)
