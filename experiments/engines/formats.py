"""Every pair of formats that a layout can store, by name; recipes are some of them."""

import dataclasses
import functools
import itertools
from typing import Literal

from draftquant.quantize.layouts import get_layout
from draftquant.recipes import ActivationFormat, Recipe, WeightFormat, load_recipe
from draftquant.recipes.schema import LayoutName

FamilyName = Literal[
    "eagle3-llama", "eagle3-mla", "dflash", "dflash2", "dspark", "dspark-mla", "language-model",
]  # fmt: skip
LAYOUTS: tuple[LayoutName, ...] = ("quark", "modelopt", "compressed-tensors", "fp8", "awq")
_weights = functools.partial(WeightFormat, symmetric=True)
WEIGHTS = {
    "int4-channel": _weights(dtype="int4", granularity="channel"),
    "int4-of-fp8": _weights(dtype="int4", granularity="channel", first_stage="fp8_e4m3"),
    "int4-group128": _weights(dtype="int4", granularity="group", group_size=128),
    "int4-group128-float16": _weights(
        dtype="int4", granularity="group", group_size=128, scale_dtype="float16"
    ),
    "fp8-channel": _weights(dtype="fp8_e4m3", granularity="channel"),
    "fp8-tensor": _weights(dtype="fp8_e4m3", granularity="tensor"),
    "fp8-block": _weights(dtype="fp8_e4m3", granularity="block", group_size=128),
    "nvfp4": _weights(dtype="nvfp4", granularity="group", group_size=16),
    "mxfp4": _weights(dtype="mxfp4", granularity="group", group_size=32),
}
ACTIVATIONS = {
    "weights-only": None,
    "fp8-token": ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True),
    "fp8-static": ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False),
    "fp8-group": ActivationFormat(dtype="fp8_e4m3", granularity="group", dynamic=True),
    "nvfp4": ActivationFormat(dtype="nvfp4", granularity="group", dynamic=True),
    "mxfp4": ActivationFormat(dtype="mxfp4", granularity="group", dynamic=True),
}


def format_recipe(layout: LayoutName, weights: str, activations: str) -> Recipe:
    """A recipe like the shipped ones, with these formats in this layout."""
    return dataclasses.replace(
        load_recipe("fp8-ptpc"),
        name=f"{layout}-{weights}-{activations}",
        summary=f"{weights} with {activations} in layout {layout}",
        backend="torch",
        layout=layout,
        weights=WEIGHTS[weights],
        activations=ACTIVATIONS[activations],
    )


def all_formats() -> list[Recipe]:
    """Everything that some layout can express."""
    recipes = itertools.starmap(format_recipe, itertools.product(LAYOUTS, WEIGHTS, ACTIVATIONS))
    return [
        recipe
        for recipe in recipes
        if get_layout(recipe.layout).problem(recipe) is None
        # The dtype of scales matters where a layout prescribes it only.
        and (recipe.weights.scale_dtype is None or recipe.layout == "awq")
    ]
