"""SGLang's plugin: drafts that Quark stored as INT4 per channel with FP8 activations (W4A8).

SGLang has no scheme for them: "No quark compatible scheme was found". Registered as
`sglang.srt.plugins`; switched off by SGLANG_PLUGINS, like any. Loading was executed with 0.5.23.
"""

from typing import Any

from sglang.srt.layers import parameter
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.quark.quark import QuarkConfig, QuarkLinearMethod

from .int4_linear import as_fp8, unpack_at_load


class SglangInt4Quark(QuarkConfig):
    """SGLang's own, which treats INT4 per channel as the FP8 that it is unpacked to."""

    def _get_scheme_from_config(self, config: dict[str, Any]) -> Any:
        return super()._get_scheme_from_config(as_fp8(config))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """See SGLang's `QuantizationConfig`."""
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, QuarkLinearMethod):
            unpack_at_load(self, layer, prefix, parameter)
        return method


def register() -> None:
    """Called by SGLang in each of its processes, before it reads a config."""
    QUANTIZATION_METHODS["quark"] = SglangInt4Quark
