"""Regular expressions of excludes and targets that mean linears of the layer, or all but these.

Each begins as no name of a linear of the target does; see `layer_names`.
"""

import re
from collections.abc import Iterable, Sequence

from ...drafts.engine_traits import fused_names
from ...stored.layouts.module_patterns import PatternProblem, matches
from ..grafted_layer import GraftedLayer
from .convention import leaves_of, refused, told_apart


def patterns_of(layer: GraftedLayer, modules: Sequence[str]) -> list[str]:
    """For these linears of the layer, by the last parts of their names where these are enough."""
    chosen = set(modules)
    others = [name for name in (*layer.quantized, *layer.kept) if name not in chosen]
    begin = f"re:{layer.names.pattern}"
    if told_apart(layer, modules, others):
        return [f"{begin}(?:.*\\.)?{re.escape(leaf)}$" for leaf in leaves_of(layer, modules)]
    names = (name for module in modules for name in (module, *fused_names(module)))
    paths = {layer.names.within_layer(name) for name in names}
    return [f"{begin}{re.escape(path)}$" for path in sorted(paths)]


def float_patterns(layer: GraftedLayer) -> list[str]:
    """For what is not quantized of the layer: all of it where nothing is."""
    if layer.declared is None:
        return [f"re:{layer.names.pattern}"]
    return patterns_of(layer, layer.kept) if layer.kept else []


def excludes_without(old: Iterable[object] | None, layer: GraftedLayer) -> list[str]:
    """The target's excludes; patterns that mean a quantized linear of the layer, without the layer.

    Names of the layer's quantized linears go.

    Raises:
        LayoutError: one of them is no pattern that is understood.
    """
    names = layer.quantized_names
    pattern = layer.names.pattern
    found = []
    for entry in map(str, old or ()):
        if entry.startswith(f"re:{pattern}"):
            continue  # of an earlier graft
        if not any(means(entry, name) for name in names):
            found.append(entry)
        elif entry.startswith("re:"):
            found.append(f"re:(?!{pattern})(?:{entry[3:]})")
    return found


def only_some_engines(excludes: Iterable[str], layer: GraftedLayer) -> dict[str, str]:
    """Why SGLang cannot take the layer: it takes names for the last parts of others, vLLM does not.

    Neither a name nor a pattern says the same of the target's linears to both.
    """
    names = layer.quantized_names
    ends = {name[i + 1 :] for name in names for i, sign in enumerate(name) if sign == "."}
    hit = next((entry for entry in excludes if entry in ends and entry not in names), None)
    if hit is None:
        return {}
    return {"sglang": f"the target's exclude {hit!r} means quantized linears of the layer there"}


def means(target: str, module: str) -> bool:
    """Whether a target or exclude, a name or `re:`, means a module.

    Raises:
        LayoutError: it is no pattern that is understood.
    """
    if not target.startswith("re:"):
        return target == module
    try:
        return matches(target[3:], module)
    except PatternProblem as exc:
        raise refused(
            f"{target!r} in a quantization_config is no pattern that can be decided: {exc}",
            fix="write it as a plain regular expression, or as names",
        ) from exc
