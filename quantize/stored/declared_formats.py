"""The formats of a quantized folder in the words of recipes, whoever made it."""

from collections.abc import Mapping
from typing import get_args

from ...recipes.formats import NUMBER_FORMATS, GroupedActivations
from ...recipes.schema import ActivationFormat, WeightFormat
from ..errors import LayoutError
from .layouts.scheme import Activations, DeclaredScheme
from .layouts.stored_dtypes import is_of_recipes
from .parts import scale_suffix
from .stored_draft import StoredDraft

_ACTIVATIONS: Mapping[Activations, ActivationFormat | None] = {
    "none": None,
    "token-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="token", dynamic=True),
    "tensor-static": ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False),
    "group-dynamic": ActivationFormat(dtype="fp8_e4m3", granularity="group", dynamic=True),
    **{
        dtype: ActivationFormat(dtype=dtype, granularity="group", dynamic=True)
        for dtype in get_args(GroupedActivations)
    },
}


_NAMES: Mapping[ActivationFormat | None, Activations] = {
    activations: name for name, activations in _ACTIVATIONS.items()
}


def declared_activations(activations: ActivationFormat | None) -> Activations:
    """How every layout's declaration is read where a recipe has these activations."""
    return _NAMES[activations]


def weight_format(stored: StoredDraft, scheme: DeclaredScheme) -> WeightFormat:
    """The declared format of the weights; `scale_dtype` says that INT4 scales are float16.

    Raises:
        LayoutError: recipes have no name for it.
    """
    int4 = scheme.number.is_integer and scheme.first_stage is None
    sizes = NUMBER_FORMATS[scheme.weight_dtype].sizes if is_of_recipes(scheme.weight_dtype) else {}
    size = (scheme.group_size,) if scheme.group_size else ()
    known = scheme.granularity in sizes and set(size) <= set(sizes[scheme.granularity])
    if not is_of_recipes(scheme.weight_dtype) or not known:
        size_of = f" of {scheme.group_size}" if scheme.group_size else ""
        raise LayoutError(
            f"weights {scheme.weight_dtype} per {scheme.granularity}{size_of}",
            "no layout that draftquant writes has this format",
            fix="`draftquant dequantize` the folder, and quantize the weights with a recipe",
        )
    return WeightFormat(
        dtype=scheme.weight_dtype,
        granularity=scheme.granularity,
        symmetric=True,
        group_size=scheme.group_size,
        scale_dtype="float16" if int4 and _scale_dtypes(stored, scheme) == {"F16"} else None,
        first_stage=scheme.first_stage,
    )


def activation_format(scheme: DeclaredScheme) -> ActivationFormat | None:
    """The declared format of the inputs; None where they are not rounded.

    Raises:
        LayoutError: recipes have no name for it.
    """
    if scheme.activations not in _ACTIVATIONS:
        raise LayoutError(
            f"activations {scheme.activations}",
            "expected FP8 scales per token, or static ones: no recipe has the format of"
            " this folder",
            fix="quantize the BF16 draft with a recipe instead",
        )
    return _ACTIVATIONS[scheme.activations]


def _scale_dtypes(stored: StoredDraft, scheme: DeclaredScheme) -> set[str]:
    suffix = scale_suffix(scheme)
    return {stored.checkpoint.tensors[f"{module}.{suffix}"].dtype for module in stored.modules}
