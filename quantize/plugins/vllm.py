"""vLLM's plugin: drafts that Quark stored as INT4 per channel with FP8 activations (W4A8).

vLLM has no scheme for them: "No quark compatible scheme was found". Registered as
`vllm.general_plugins`; switched off by VLLM_PLUGINS, like any. Executed with 0.32 and 0.33, whose
`quark.py` files are identical.
"""

from typing import Any

from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig, QuarkLinearMethod

from .int4_linear import as_fp8, unpack_at_load


class VllmInt4Quark(QuarkConfig):
    """vLLM's own, which treats INT4 per channel as the FP8 that it is unpacked to."""

    def _get_scheme_cls_from_config(self, config: dict[str, Any]) -> Any:
        return super()._get_scheme_cls_from_config(as_fp8(config))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """See vLLM's `QuantizationConfig`."""
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, QuarkLinearMethod):
            unpack_at_load(self, layer, prefix, parameter)
        return method


def register() -> None:
    """Called by vLLM in each of its processes, at any time and more than once."""
    register_quantization_config("quark")(VllmInt4Quark)
