"""vLLM's plugin: drafts that Quark stored as INT4 per channel with FP8 activations (W4A8).

vLLM has no scheme for them: "No quark compatible scheme was found". Registered as
`vllm.general_plugins`; switched off by VLLM_PLUGINS, like any. Loading was executed with 0.26 to
0.33.
"""

from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig, QuarkLinearMethod

from .int4_linear import Int4Quark


class VllmInt4Quark(Int4Quark, QuarkConfig):
    """vLLM's own, which takes INT4 per channel too."""

    linear_method, parameters = QuarkLinearMethod, parameter


def register() -> None:
    """Called by vLLM in each of its processes, at any time and more than once."""
    register_quantization_config("quark")(VllmInt4Quark)
