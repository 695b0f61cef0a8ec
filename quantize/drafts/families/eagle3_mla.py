"""EAGLE-3 with multi-head latent attention: the kind of kimi-k2.5-eagle3-mla.

TorchSpec writes `midlayer.*`, or `layers.0.*` for vLLM; ModelOpt writes `layers.0.*` without
embed_tokens and `draft_vocab_size`. The keys of a mixture of experts that ModelOpt's config keeps
from its template mean nothing: every engine builds one dense MLP.
"""

from typing_extensions import override

from .. import engine_traits as traits
from ..config_reader import KEY, SECTION, ConfigReader
from ..shared.eagle3 import Eagle3, Eagle3Geometry, read_common
from ..shared.layers import with_latent

_IN_VLLM = frozenset({
    "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
})  # fmt: skip
ENGINE_TRAITS = traits.EngineTraits(
    usual_type="kimi_k2",
    latent=True,
    prunes_vocabulary=True,
    vllm=traits.InVllm(
        architectures=_IN_VLLM,
        problem=lambda draft: (
            None
            if draft.geometry.fuses
            else traits.Finding(
                "wrong",
                "model.fc.weight stays uninitialised: vLLM builds fc for every MLA draft",
                "serve it with SGLang",
            )
        ),
        roots=traits.refused_roots("DeepseekV2Eagle3Model", "model"),
        fusion=traits.Fusion(),  # `deepseek_eagle3.py:189`
        # `deepseek_eagle3.py:225` gives the head no declaration.
    ),
    sglang=traits.InSglang(
        architectures=frozenset({"Eagle3DeepseekV2ForCausalLM"}),
        roots=traits.dropped_roots("model."),
        layer_name="model.midlayer.{path}",
        layer_prefix="model.{path}",
        fc_sharding="column",
        plain_fc=False,
        most_layers=1,
        fusion=traits.Fusion(  # `kimi_k25_eagle3.py:48,208`
            counted_by=(f"{SECTION}.{KEY}", KEY), counts_empty=True, refuses_null=False
        ),
    ),
    tensorrt_llm=traits.InTensorRtLlm(
        architectures=frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepSeekV3ForCausalLM"})
    ),
)


class Eagle3Mla(Eagle3):
    """The EAGLE-3 MLA family: vLLM 0.33 knows both architectures, SGLang 0.5.23 the first."""

    name = "eagle3-mla"
    engine_traits = ENGINE_TRAITS
    architectures = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
    own_marks = (r"kv_[ab]_proj",)
    marks = frozenset(
        {"layers.0.self_attn.kv_a_proj_with_mqa.weight", "layers.0.hidden_norm.weight"}
    )

    @override
    def geometry(self, keys: ConfigReader) -> Eagle3Geometry:
        return Eagle3Geometry(**with_latent(keys, read_common(keys, self.name)))


FAMILY = Eagle3Mla()
