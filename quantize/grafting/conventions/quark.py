"""Quark: `layer_quant_config` has the layer's format by patterns, `exclude` its floats.

The patterns are shell wildcards for whole names in both engines (`_find_matched_config`), the first
one that fits holds; excludes are names or `re:`.
"""

from collections.abc import Mapping
from typing import Any

from ..grafted_layer import GraftedLayer
from .convention import Merged, other_tool, refused, same_names
from .patterns import excludes_without, float_patterns

METHOD = "quark"
_SPEC = ("bias", "input_tensors", "output_tensors", "weight")
_MEANT = ("dtype", "qscheme", "ch_axis", "group_size", "is_dynamic", "symmetric", "scale_format")
"""Keys of a tensor's spec by which it is decoded; the others say how values were found."""


def merged(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer in it.

    Raises:
        LayoutError: the layer's is another tool's, has several formats, or is packed otherwise.
    """
    if layer.declared is not None and layer.method != METHOD:
        raise other_tool(layer, METHOD)
    wildcards = [f"{start}.*" for start in layer.names.beginnings]
    others = target.get("layer_quant_config") or {}
    own: dict[str, Any] = {}
    if layer.declared is not None:
        spec = _spec(layer.declared, wildcards)
        _check_packing(target, layer.declared)
        whole = target.get("global_quant_config") or {}
        if any(_meant(spec[key]) != _meant(whole.get(key)) for key in _SPEC):
            own = dict.fromkeys(wildcards, spec)
        elif any(others):
            own = {name: dict(target["global_quant_config"]) for name in wildcards}
    left = {name: spec for name, spec in others.items() if name not in wildcards}
    excludes = [*excludes_without(target.get("exclude"), layer), *float_patterns(layer)]
    value = {**target, "exclude": excludes, "layer_quant_config": {**own, **left}}
    return Merged(value=value, cannot=same_names(layer))


def _spec(declared: Mapping[str, Any], wildcards: list[str]) -> dict[str, Any]:
    """The one format of the layer: in a folder of its own, or in that of its target."""
    by_name = declared.get("layer_quant_config") or {}
    of_layer = [by_name[name] for name in wildcards if name in by_name]
    if by_name and not of_layer and declared.get("exclude") is None:
        raise refused(
            "the layer's layer_quant_config has several formats",
            fix="quantize the layer in one format for a target of Quark",
        )
    whole = of_layer[0] if of_layer else declared.get("global_quant_config") or {}
    return {key: whole.get(key) for key in _SPEC}


def _meant(spec: object) -> object:
    """What a tensor's spec, or a list of stages, says of the stored values."""
    if isinstance(spec, list):
        return [_meant(stage) for stage in spec]
    return {key: spec.get(key) for key in _MEANT} if isinstance(spec, Mapping) else spec


def _check_packing(target: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    packed = [(each.get("export") or {}).get("pack_method") for each in (target, layer)]
    if packed[0] != packed[1]:
        raise refused(
            f"the target packs its values in {packed[0]!r}, the layer in {packed[1]!r}",
            fix="quantize the layer in layout compressed-tensors for a target of that tool, or"
            " graft it unquantized",
        )
