"""ModelOpt: one algorithm for all linears, and wildcards of those that are floats."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from ..grafted_layer import GraftedLayer
from .convention import Merged, leaves_of, other_format, other_tool, refused, same_names, told_apart

METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
_KEYS = ("exclude_modules", "ignore")
_FORMAT = ("quant_algo", "group_size")


def merged(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer's linears out of, or in, the wildcards.

    Raises:
        LayoutError: the layer is quantized otherwise than the target, or wildcards of the target
            mean the layer's linears among others.
    """
    algorithm = str(target.get("quant_algo"))
    if layer.declared is not None:
        if layer.method != METHOD:
            raise other_tool(layer, METHOD)
        same = all(target.get(key) == layer.declared.get(key) for key in _FORMAT)
        if not same and algorithm != MIXED:
            raise other_format(layer, algorithm, METHOD)
    keys = [key for key in _KEYS if isinstance(target.get(key), list)] or [_KEYS[0]]
    value = dict(target)
    for key in keys:
        old = [str(entry) for entry in target.get(key) or ()]
        value[key] = list(dict.fromkeys([*_left(old, layer), *_floats(layer)]))
    if algorithm == MIXED and layer.declared is not None:
        own = {key: layer.declared[key] for key in _FORMAT if layer.declared.get(key) is not None}
        named = dict.fromkeys(layer.quantized_names, own)
        value["quantized_layers"] = {**(target.get("quantized_layers") or {}), **named}
    return Merged(value=value, cannot=same_names(layer))


def _left(old: list[str], layer: GraftedLayer) -> list[str]:
    """The target's excludes without those of the layer's quantized linears."""
    found = []
    for entry in old:
        if not _covers(entry, layer.quantized_names):
            found.append(entry)
        elif not layer.names.contains(entry.rstrip("*.")):
            raise refused(
                f"the target's exclude {entry!r} means quantized linears of the layer as well, and"
                " a wildcard cannot except them",
                fix="name the target's own modules there, or graft the layer unquantized",
            )
    return found


def _covers(entry: str, names: tuple[str, ...]) -> bool:
    return any(entry in name or fnmatch.fnmatch(name, entry) for name in names)


def _floats(layer: GraftedLayer) -> list[str]:
    """Wildcards of the layer's float linears: all of it where nothing is quantized."""
    starts = layer.names.beginnings
    if layer.declared is None:
        return [f"{start}.*" for start in starts]
    if not told_apart(layer, layer.kept, layer.quantized):
        names = (name for module in layer.kept for name in layer.names.everywhere(module))
        return list(dict.fromkeys(names))
    return [f"{start}.*{leaf}" for start in starts for leaf in leaves_of(layer, layer.kept)]
