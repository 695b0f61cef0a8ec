"""Layouts: how quantized weights are named, packed and declared on disk."""

from collections.abc import Iterable

from ...recipes.errors import LayoutError
from ...recipes.schema import LayoutName, Recipe
from ..drafts.family import Row
from ..stored.layouts import LAYOUTS
from ..stored.layouts.scheme import OwnFormat
from .layout import (
    AwqLayout,
    CompressedTensorsLayout,
    Fp8Layout,
    Layout,
    ModelOptLayout,
    QuarkLayout,
    last_part,
)

_LAYOUTS: dict[LayoutName, Layout] = {
    "quark": QuarkLayout(),
    "modelopt": ModelOptLayout(),
    "compressed-tensors": CompressedTensorsLayout(),
    "fp8": Fp8Layout(),
    "awq": AwqLayout(),
}


def get_layout(name: LayoutName) -> Layout:
    """The layout of a recipe."""
    return _LAYOUTS[name]


def check_layout(recipe: Recipe) -> None:
    """LayoutError where the layout cannot express the formats of a recipe; names those that can."""
    where, layout = f"layout {recipe.layout}", get_layout(recipe.layout)
    for form in recipe.formats:
        problem = layout.problem(recipe.in_format(form).stored)
        if problem is not None:
            raise LayoutError(where, f"{problem}: {form}", fix=_use(recipe))
    if len(recipe.formats) > 1 and layout.mix_problem is not None:
        formats = "; ".join(map(str, recipe.formats))
        what = f"{layout.mix_problem}: the recipe has {len(recipe.formats)}: {formats}"
        raise LayoutError(where, what, fix=_use(recipe))
    if recipe.kv_cache is not None and layout.cache_problem is not None:
        what = f"{layout.cache_problem}, and the recipe has one: {recipe.kv_cache}"
        raise LayoutError(where, what, fix="leave 'kv_cache' out, or " + _use(recipe))


def check_head(recipe: Recipe, row: Row) -> None:
    """LayoutError where a row is a head that no engine would read as a recipe stores it.

    Sources: `get_quant_method` of each layout in vLLM 0.33 and SGLang 0.5.23, and SGLang's
    `get_lm_head_scheme` (`compressed_tensors.py:1093`), which refuses scales of blocks.
    """
    if row.role != "head":
        return
    named = f"layout {recipe.layout}: {row.tensor.name}"
    able = [n for n in _LAYOUTS if LAYOUTS[n].names_heads or LAYOUTS[n].heads_are_linears]
    if recipe.layout not in able:
        raise LayoutError(
            named,
            "engines do not load a quantized head of a draft in this layout",
            fix=f"keep the head, or use layout {' or '.join(able)}",
        )
    if recipe.weights.granularity == "block":
        raise LayoutError(
            named,
            "engines split a head by rows of the vocabulary, which does not work with scales per"
            " block",
            fix="give the head a format of its own with scales per channel, or keep it",
        )


def named_heads(recipe: Recipe, rows: Iterable[Row]) -> tuple[OwnFormat, ...]:
    """The heads among quantized rows of a recipe of one format, where a target must name them."""
    heads = {last_part(row.module) for row in rows if row.role == "head"}
    named = heads and LAYOUTS[recipe.layout].names_heads
    return (OwnFormat(recipe.stored, tuple(sorted(heads))),) if named else ()


def _use(recipe: Recipe) -> str:
    each = [recipe.in_format(form).stored for form in recipe.formats]
    able = [
        name
        for name, layout in _LAYOUTS.items()
        if (layout.mix_problem is None or len(each) == 1) and not any(map(layout.problem, each))
        if recipe.kv_cache is None or layout.cache_problem is None
    ]
    if able:
        return f"use one of: {', '.join(able)}"
    if len(each) == 1:
        return "use another format: no layout can declare these two together"
    return "use fewer formats: no layout can declare all of them"
