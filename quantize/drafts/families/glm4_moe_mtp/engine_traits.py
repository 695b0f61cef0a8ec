"""GLM-4's MTP layer in engines."""

from ...engine_traits import MtpLayer
from ...shared.mtp.engine_traits import NO_PARAMETER, mtp_traits

ENGINE_TRAITS = mtp_traits(
    frozenset({"Glm4MoeForCausalLM"}),
    vllm=MtpLayer(
        layer="model.layers.{n}.mtp_block.",
        prefix="model.layers.{n}.",
        no_parameter=NO_PARAMETER,
        lists_parts=True,
    ),
    sglang=MtpLayer(
        layer="model.decoder.",
        prefix="model.decoder.",
        most_modules=1,  # `glm4_moe.py:1080`; executed
    ),
    more_in_sglang=frozenset({"Glm4MoeForCausalLMNextN"}),
)
