"""Recipes that quantize the head or fc beside the layers, by name."""

import dataclasses
from collections.abc import Mapping

from draftquant.recipes import Algorithm, Format, Recipe, Rule, load_recipe
from draftquant.recipes.schema import LayoutName
from mixes import FP8, FP8_STATIC, INT4, INT4_CHANNEL, MXFP4, NVFP4
from weight_formats import INT4_F16

NVFP4_ALONE = Format(weights=NVFP4.weights, activations=None)
FP8_CHANNEL_ALONE = Format(weights=FP8.weights, activations=None)
FP16_INT4 = Format(weights=INT4_F16, activations=None)
HEAD, FUSION = ("lm_head.weight",), ("*fc.weight",)


def beyond(
    name: str,
    own: Format,
    *,
    head: Format | None = None,
    fusion: Format | None = None,
    layout: LayoutName = "compressed-tensors",
) -> Recipe:
    """`own` for the layers, and formats for the head and for fc; None = kept."""
    base = load_recipe("fp8-ptpc")
    rules = tuple(
        Rule(tensor=pattern, action="quantize", format=None if form == own else form)
        for pattern, form in ((HEAD, head), (FUSION, fusion))
        if form is not None
    )
    roles = [role for role, form in (("head", head), ("fusion", fusion)) if form is not None]
    kept = tuple(
        dataclasses.replace(rule, optional=rule.optional or rule.role[0] in roles)
        for rule in base.rules
    )
    said = "; ".join(f"{role} {form}" for role, form in (("head", head), ("fc", fusion)) if form)
    return dataclasses.replace(
        base,
        name=name,
        summary=f"{own}; {said}",
        loads_on=(),
        layout=layout,
        backend="torch",
        weights=own.weights,
        activations=own.activations,
        algorithm=Algorithm(scale="absmax", rounding="nearest"),
        rules=(*kept, *rules),
    )


BEYOND: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        beyond("fp8-head", FP8, head=FP8),
        beyond("fp8-static-head", FP8, head=FP8_STATIC),
        beyond("fp8-weights-head", FP8, head=FP8_CHANNEL_ALONE),
        beyond("int4-group128-head", FP8, head=INT4),
        beyond("int4-channel-head", FP8, head=INT4_CHANNEL),
        beyond("nvfp4-head", FP8, head=NVFP4),
        beyond("nvfp4-weights-head", FP8, head=NVFP4_ALONE),
        beyond("mxfp4-head", FP8, head=MXFP4),
        beyond("int4-fc", FP8, fusion=INT4),
        beyond("int4-channel-fc", FP8, fusion=INT4_CHANNEL),
        beyond("fp8-fc", FP8, fusion=FP8),
        beyond("nvfp4-fc", FP8, fusion=NVFP4),
        beyond("int4-head-and-fc", INT4, head=INT4, fusion=INT4),
        beyond("modelopt-fp8-head", FP8_STATIC, head=FP8_STATIC, layout="modelopt"),
        beyond("modelopt-ptpc-head", FP8, head=FP8, layout="modelopt"),
        beyond("modelopt-nvfp4-head", NVFP4, head=NVFP4, layout="modelopt"),
        beyond("modelopt-nvfp4a16-head", NVFP4_ALONE, head=NVFP4_ALONE, layout="modelopt"),
        beyond("modelopt-fp8-fc", FP8_STATIC, fusion=FP8_STATIC, layout="modelopt"),
        beyond("modelopt-nvfp4-fc", NVFP4, fusion=NVFP4, layout="modelopt"),
        beyond("quark-fp8-fc", FP8, fusion=FP8, layout="quark"),
        beyond("quark-int4-fc", INT4, fusion=INT4, layout="quark"),
        beyond("quark-mxfp4-fc", MXFP4, fusion=MXFP4, layout="quark"),
        beyond("fp8-layout-fc", FP8_STATIC, fusion=FP8_STATIC, layout="fp8"),
        beyond("awq-fc", FP16_INT4, fusion=FP16_INT4, layout="awq"),
    )
}
LOADED = (
    "fp8-head", "int4-group128-head", "int4-channel-head", "nvfp4-head", "int4-fc", "fp8-fc",
    "modelopt-fp8-head", "modelopt-nvfp4-head", "modelopt-fp8-fc", "quark-fp8-fc", "quark-int4-fc",
)  # fmt: skip
"""Those that engines are asked to load."""
