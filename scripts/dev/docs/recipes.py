"""The page of the built-in recipes, and the page of the formats that a recipe may use."""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping

from ....quantize.engines.contract import TITLES
from ....quantize.gpus import gpu_names
from ....quantize.layouts import get_layout
from ....recipes import Recipe, built_in_recipes, load_recipe
from ....recipes.formats import NUMBER_FORMATS, Granularity
from ....recipes.schema import ActivationFormat, LayoutName, WeightFormat
from ....recipes.schemes import DIFFERENT, REFUSED, SAME
from .markdown import code, page, table, text

_NONE = "no engine without the draftquant plugin"
_SCALES = {None: "dtype of the weight, or float16", "U8": "U8, an exponent of two"}


def recipes_page() -> str:
    """Every built-in recipe: what it does, how it is stored, where it loads."""
    recipes = [load_recipe(name) for name in built_in_recipes()]
    return page(
        "Built-in recipes",
        "[Which recipe for my GPU?](../recipes.md) helps to choose. `draftquant recipes show"
        " NAME` prints a recipe with all its rules.",
        table(
            ["recipe", "what it does"], ([code(each.name), text(each.summary)] for each in recipes)
        ),
        "## How they are stored",
        table(
            ["recipe", "weights", "activations", "algorithm", "layout", "backend"],
            map(_stored, recipes),
        ),
        "## Where they load",
        "`draftquant check` says LOADS of the result, with nothing changed by hand, for these"
        " engines, GPUs and families. A GPU stands for all GPUs of its"
        " [architecture](engines.md#gpus). [Engines](../../experiments/engines.md) has what they"
        " really did, for all families.",
        table(["recipe", "engine", "GPUs", "families"], _loading(recipes)),
        "## Names of other tools",
        "`--recipe` also takes the name that a scheme has in llm-compressor, ModelOpt,"
        " AutoRound, Quark or SGLang, where a built-in recipe has the same number formats. Upper"
        " and lower case, `-` and `_`, a `_CFG` at the end and `mtq.` in front make no"
        " difference.",
        table(["recipe", "names elsewhere"], _grouped(SAME)),
        "These names have no recipe of their own. draftquant refuses them and says what to do:",
        table(["what to do", "names elsewhere"], _grouped(DIFFERENT, text)),
    )


def _grouped(names: Mapping[str, str], form: Callable[[str], str] = code) -> Iterator[list[str]]:
    """The names with one meaning, in one row."""
    for meaning in dict.fromkeys(names.values()):
        alike = [code(name) for name, each in names.items() if each == meaning]
        yield [form(meaning), ", ".join(alike)]


def _stored(recipe: Recipe) -> list[str]:
    activations = str(recipe.activations or "none")
    formats = [text(str(recipe.weights)), text(activations), recipe.algorithm.name]
    return [code(recipe.name), *formats, recipe.layout, recipe.backend]


def _loading(recipes: list[Recipe]) -> Iterator[list[str]]:
    for recipe in recipes:
        if not recipe.loads_on:
            yield [code(recipe.name), _NONE, "", ""]
        for place in recipe.loads_on:
            engine, gpus = TITLES[place.engine], gpu_names(place.arch)
            yield [code(recipe.name), engine, gpus, ", ".join(place.family)]


def formats_page() -> str:
    """Number formats, which layout holds which of them, and what toolkits are not asked for."""
    layouts = typing.get_args(LayoutName)
    return page(
        "Formats",
        "A format says which values a quantized weight may have, and how many of them share a"
        " scale (w ≈ value * scale). A layout says how values and scales are named, packed and"
        " declared in config.json. [recipes/README.md](../../recipes/README.md) has the keys of"
        " a recipe file for both.",
        "## Number formats",
        table(
            ["dtype", "bits of a value", "largest value", "scales", "dtype of scales"], _numbers()
        ),
        "## What a layout holds",
        "Each row is a format of weights, with the formats of activations that the layout"
        " allows beside it. `none` means that the activations are not rounded.",
        *(part for name in layouts for part in (f"### {name}", _held(name))),
        "## Algorithms that a backend refuses",
        table(
            ["backend", "algorithm", "why"],
            ([code(key[0]), code(key[1]), text(why.reason)] for key, why in REFUSED.items()),
        ),
    )


def _numbers() -> Iterator[list[str]]:
    for dtype, number in NUMBER_FORMATS.items():
        sizes = (_of_sizes(each, groups) for each, groups in number.sizes.items())
        scale = _SCALES.get(number.scale_dtype, number.scale_dtype or "")
        below = ", with one more scale for the matrix" if number.global_scale else ""
        yield [
            code(dtype),
            str(number.bits),
            f"{number.largest:g}",
            "one per " + "; ".join(sizes),
            scale + below,
        ]


def _of_sizes(granularity: Granularity, groups: tuple[int, ...]) -> str:
    return f"{granularity} of {', '.join(map(str, groups))}" if groups else granularity


def _held(layout: LayoutName) -> str:
    """The table of one layout: weights, and the activations that go with them."""
    recipe = load_recipe("fp8-ptpc")
    rows = []
    for weights in _weight_formats():
        able = []
        for activations in _activation_formats():
            asked = dataclasses.replace(
                recipe, layout=layout, weights=weights, activations=activations
            )
            if get_layout(layout).problem(asked) is None:
                able.append(str(activations or "none"))
        if able:
            scales = f", {weights.scale_dtype} scales" if weights.scale_dtype else ""
            rows.append([text(f"{weights}{scales}"), text("; ".join(able))])
    return table(["weights", "activations"], rows)


def _weight_formats() -> Iterator[WeightFormat]:
    """Every format of weights; for INT4 also float16 scales and two stages."""
    for dtype, number in NUMBER_FORMATS.items():
        for granularity, sizes in number.sizes.items():
            for size in sizes or (None,):
                form = WeightFormat(
                    dtype=dtype, granularity=granularity, symmetric=True, group_size=size
                )
                kin = (
                    form,
                    dataclasses.replace(form, scale_dtype="float16"),
                    dataclasses.replace(form, first_stage="fp8_e4m3"),
                )
                yield from (each for each in kin if each.problem() is None)


def _activation_formats() -> Iterator[ActivationFormat | None]:
    """Every format of inputs, and none."""
    yield None
    hints = typing.get_type_hints(ActivationFormat)
    for dtype, granularity, dynamic in itertools.product(
        typing.get_args(hints["dtype"]), typing.get_args(hints["granularity"]), (False, True)
    ):
        form = ActivationFormat(dtype=dtype, granularity=granularity, dynamic=dynamic)
        if form.problem() is None:
            yield form
