"""Regular expressions of excludes and targets that mean linears of the layer, or all but these.

Each begins as no name of a linear of the target does; see `layer_names`.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from ...drafts.fused import fused_names
from ...stored.patterns import PatternProblem, matches
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
    """The target's excludes; those that mean a quantized linear of the layer, without the layer.

    Raises:
        LayoutError: one of them is no pattern that is understood.
    """
    names = layer.quantized_names
    plain = {*names, *(name[i + 1 :] for name in names for i, c in enumerate(name) if c == ".")}
    pattern = layer.names.pattern
    found = []
    for entry in map(str, old or ()):
        if entry.startswith(f"re:{pattern}"):
            continue  # of an earlier graft
        if not _hits(entry, names, plain):
            found.append(entry)
        elif entry.startswith("re:"):
            found.append(f"re:(?!{pattern})(?:{entry[3:]})")
        elif not layer.names.contains(entry):
            found.append(f"re:(?!{pattern})(?:.*\\.)?{re.escape(entry)}$")
    return found


def _hits(entry: str, names: Iterable[str], plain: Collection[str]) -> bool:
    """Whether an exclude means one of these names, in one engine at least."""
    if not entry.startswith("re:"):
        return entry in plain
    return any(means(entry, name) for name in names)


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
