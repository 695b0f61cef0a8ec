"""What the conventions of declarations have in common: which names mean what."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....recipes.errors import LayoutError
from ...drafts.engine_traits import fused_names
from ..grafted_layer import GraftedLayer

GRAFT = "graft"
EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One declaration for the target and its layer.

    Attributes:
        value: the quantization_config.
        cannot: engine -> why it cannot take the layer as it is stored, though the other can.
    """

    value: dict[str, Any]
    cannot: Mapping[str, str] = field(default_factory=dict)


def refused(what: str, fix: str) -> LayoutError:
    """A layer that cannot be declared beside its target."""
    return LayoutError(GRAFT, what, fix=fix)


def other_format(layer: GraftedLayer, target: str, layout: str) -> LayoutError:
    """A target whose tool declares one format for everything."""
    return refused(
        f"the target declares {target}, and its tool has one format for all linears; the layer is"
        f" stored as {layer.scheme}",
        fix=f"quantize the layer with a recipe of that format in layout {layout}, or graft it"
        " unquantized",
    )


def other_tool(layer: GraftedLayer, target: str) -> LayoutError:
    """A layer in another tool's layout than the target."""
    return refused(
        f"the target's quant_method is {target!r}, the layer's {layer.method!r}: a config.json has"
        " one, by which engines read all linears",
        fix=f"draftquant transcode LAYER --layout {target} where the format allows it, quantize the"
        " layer with a recipe of that layout, or graft it unquantized",
    )


def same_names(layer: GraftedLayer) -> dict[str, str]:
    """Why an engine that has no names of its own for the layer cannot take it."""
    what = (
        "it asks for this layer's linears by the names of a layer of the target, so that no"
        " declaration can tell them apart"
    )
    return {engine: what for engine, names in layer.names.engines.items() if names is None}


def leaves_of(layer: GraftedLayer, modules: Iterable[str]) -> tuple[str, ...]:
    """Last parts of names, and of those under which engines fuse them, sorted."""
    named = {name for module in modules for name in (module, *fused_names(module))}
    return tuple(sorted({layer.names.relative(name).rpartition(".")[2] for name in named}))


def told_apart(layer: GraftedLayer, modules: Collection[str], others: Collection[str]) -> bool:
    """Whether the last parts of their names tell some linears from others."""
    return not set(leaves_of(layer, modules)) & set(leaves_of(layer, others))


def without_experts(names: Iterable[str]) -> tuple[str, ...]:
    """The same with the block of the routed experts once in the place of each of them."""
    return tuple(dict.fromkeys(_block(name) for name in names))


def _block(name: str) -> str:
    return f"{name.partition(EXPERTS)[0]}{EXPERTS.rstrip('.')}" if EXPERTS in name else name
