"""Plain fp8: one format for all linears, and a list of those that are floats.

VLLM compares whole names, SGLang parts of names between dots (`is_layer_skipped` of both).
"""

from collections.abc import Mapping
from typing import Any

from ..grafted_layer import GraftedLayer
from .convention import Merged, other_format, other_tool, same_names, without_experts

METHOD = "fp8"
_KEYS = ("ignored_layers", "modules_to_not_convert")
_FORMAT = ("activation_scheme", "weight_block_size")
_NAMELESS = (
    "it gives this layer's linears no name of their own (self_attn.q_proj), and compares excludes"
    " with parts of names: it would take the target's for excluded as well"
)


def merged(target: Mapping[str, Any], layer: GraftedLayer) -> Merged:
    """The target's declaration with the layer's linears out of, or in, the list of floats.

    Raises:
        LayoutError: the layer is quantized otherwise than the target.
    """
    if layer.declared is not None:
        if layer.method != METHOD:
            raise other_tool(layer, METHOD)
        if any(target.get(key) != layer.declared.get(key) for key in _FORMAT):
            said = ", ".join(f"{key} {target.get(key)}" for key in _FORMAT)
            raise other_format(layer, f"fp8 ({said})", METHOD)
    keys = [key for key in _KEYS if isinstance(target.get(key), list)] or [_KEYS[1]]
    kept = without_experts(name for module in layer.kept for name in _whole(layer, module))
    names = set(layer.quantized_names)
    value = dict(target)
    for key in keys:
        old = [str(entry) for entry in target.get(key) or ()]
        left = [e for e in old if not layer.names.contains(e) or not _covers(e, names)]
        value[key] = list(dict.fromkeys([*left, *kept]))
    return Merged(value=value, cannot=_cannot(layer, value[keys[0]], names))


def _whole(layer: GraftedLayer, module: str) -> tuple[str, ...]:
    """Names of a float linear that begin as no other linear's does."""
    return tuple(n for n in layer.names.everywhere(module) if n.partition(".")[0] in _ROOTS)


_ROOTS = frozenset({"model", "mtp"})


def _covers(entry: str, names: set[str]) -> bool:
    """Whether an exclude means one of these names, as SGLang compares them."""
    return any(f".{entry.rstrip('.')}." in f".{name}." for name in names)


def _cannot(layer: GraftedLayer, excludes: list[str], names: set[str]) -> dict[str, str]:
    found = same_names(layer)
    hit = next((entry for entry in excludes if _covers(entry, names)), None)
    if hit is not None:
        found["sglang"] = f"the target's exclude {hit!r} means linears of the layer there"
    own = layer.names.engines.get("sglang") or ()
    nameless = own and not any(name.partition(".")[0] in _ROOTS for name in own)
    if nameless and any(".self_attn." in name or ".mlp." in name for name in layer.kept):
        found["sglang"] = _NAMELESS
    return found
