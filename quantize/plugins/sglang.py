"""SGLang's plugin: drafts that Quark stored as INT4 per channel with FP8 activations (W4A8).

SGLang has no scheme for them: "No quark compatible scheme was found". Registered as
`sglang.srt.plugins`; switched off by SGLANG_PLUGINS, like any. Loading was executed with 0.5.19 to
0.5.23.
"""

from sglang.srt.layers import parameter
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.quark.quark import QuarkConfig, QuarkLinearMethod

from .int4_linear import Int4Quark


class SglangInt4Quark(Int4Quark, QuarkConfig):
    """SGLang's own, which takes INT4 per channel too."""

    linear_method, parameters = QuarkLinearMethod, parameter


def register() -> None:
    """Called by SGLang in each of its processes, before it reads a config."""
    QUANTIZATION_METHODS["quark"] = SglangInt4Quark
