"""How each tool declares a target and a layer that is stored otherwise, in one config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from ..grafted_layer import GraftedLayer
from . import compressed_tensors, modelopt, plain_fp8, quark
from .convention import Merged, refused

__all__ = ["Merged", "merged_declaration"]

_BY_METHOD: Mapping[str, Callable[[Mapping[str, Any], GraftedLayer], Merged]] = {
    compressed_tensors.METHOD: compressed_tensors.merged,
    modelopt.METHOD: modelopt.merged,
    plain_fp8.METHOD: plain_fp8.merged,
    quark.METHOD: quark.merged,
}


def merged_declaration(target: Mapping[str, Any] | None, layer: GraftedLayer) -> Merged | None:
    """One declaration for both; None where neither has a quantized linear.

    Args:
        target: its quantization_config; None where it declares nothing.

    Raises:
        LayoutError: there is none by which an engine reads each as it is stored.
    """
    if target is None:
        if layer.declared is None:
            return None
        if layer.method != compressed_tensors.METHOD:
            raise refused(
                f"the target is unquantized, and in layout {layer.method} a declaration cannot mean"
                " the layer alone",
                fix="draftquant transcode LAYER --layout compressed-tensors, where linears are"
                " declared by name",
            )
        return compressed_tensors.merged(None, layer)
    method = str(target.get("quant_method"))
    if method not in _BY_METHOD:
        raise refused(
            f"the target's quant_method is {method!r}, whose way to declare one layer is not known"
            " here",
            fix=f"known are {', '.join(sorted(_BY_METHOD))}",
        )
    return _BY_METHOD[method](target, layer)
