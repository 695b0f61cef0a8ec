"""Recipes whose linears have several formats, by name: what `down_proj` or attention is kept in."""

import dataclasses
from collections.abc import Mapping

import weight_formats as weights
from draftquant.recipes import (
    Algorithm,
    Expectation,
    Format,
    Recipe,
    Rule,
    WeightFormat,
    load_recipe,
)
from weight_formats import NVFP4_INPUTS, PER_TOKEN, STATIC

FP8 = Format(weights=weights.FP8_CHANNEL, activations=PER_TOKEN)
FP8_STATIC = Format(weights=weights.FP8_TENSOR, activations=STATIC)
NVFP4 = Format(weights=weights.NVFP4, activations=NVFP4_INPUTS)
MXFP4 = Format(weights=weights.MXFP4, activations=None)
INT4 = Format(
    weights=WeightFormat(dtype="int4", granularity="group", group_size=128, symmetric=True),
    activations=None,
)
INT4_CHANNEL = Format(weights=weights.INT4, activations=None)
DOWN = ("*.down_proj.weight",)
QKV = ("*.[qkv]_proj.weight", "*.q_a_proj.weight", "*.kv_a_proj_with_mqa.weight")


def mixed(own: Format, *others: tuple[Format, tuple[str, ...]], name: str = "mixed") -> Recipe:
    """`own` for every linear but those whose names match one of the patterns."""
    base = load_recipe("fp8-ptpc")
    rules = (Rule(tensor=patterns, action="quantize", format=form) for form, patterns in others)
    return dataclasses.replace(
        base,
        name=name,
        summary=f"{own}; " + "; ".join(f"{form} for {list(p)}" for form, p in others),
        loads_on=(),
        layout="compressed-tensors",
        backend="torch",
        weights=own.weights,
        activations=own.activations,
        algorithm=Algorithm(scale="absmax", rounding="nearest"),
        rules=(*base.rules, *rules),
    )


KEPT_DOWN = dataclasses.replace(
    mixed(NVFP4, name="nvfp4-bf16-down"),
    summary="NVFP4, down_proj kept in BF16",
    rules=(
        *load_recipe("fp8-ptpc").rules,
        Rule(tensor=DOWN, action="keep", why="the linear that loses most"),
    ),
    expect=Expectation(quantized_per_layer=6),
)
"""One format, beside what is kept: no mix of formats, and loaded wherever its format is."""
MIXES: Mapping[str, Recipe] = {
    name: mixed(own, *others, name=name)
    for name, own, *others in (
        ("nvfp4-fp8-down", NVFP4, (FP8, DOWN)),
        ("nvfp4-static-fp8-down", NVFP4, (FP8_STATIC, DOWN)),
        ("nvfp4-fp8-qkv", NVFP4, (FP8, QKV)),
        ("int4-fp8-down", INT4, (FP8, DOWN)),
        ("mxfp4-fp8-down", MXFP4, (FP8, DOWN)),
        ("fp8-int4-qkv-nvfp4-down", FP8, (INT4, QKV), (NVFP4, DOWN)),
    )
}
