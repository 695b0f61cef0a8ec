"""An EAGLE-3 MLA draft assembled from transformers' DeepSeek-V3 modules: the oracle of ours.

Attention, MLP and rope are those of `transformers.models.deepseek_v3`, whose KV cache holds the
latents, not the keys and values that our maths keeps. Only two things are changed: the inputs of
layer 0 are twice as wide, and the norms of the latents get the draft's epsilon, which vLLM 0.33 and
SGLang 0.5.23 hand to them (`deepseek_v2.py` of both); transformers leaves them at 1e-6.
"""

from typing import Any

from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from reference_draft import ReferenceDraft, add_norms, common_config, widen
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)


class ReferenceMlaDraft(ReferenceDraft):
    """See `ReferenceDraft`."""

    kept = ("kv_b_proj",)

    def make_config(self, g: Eagle3Geometry) -> DeepseekV3Config:  # type: ignore[override]
        return DeepseekV3Config(
            **common_config(g),
            num_key_value_heads=g.num_attention_heads,
            q_lora_rank=g.attention.q_lora_rank,
            kv_lora_rank=g.attention.kv_lora_rank,
            qk_nope_head_dim=g.attention.qk_nope_head_dim,
            qk_rope_head_dim=g.attention.qk_rope_head_dim,
            v_head_dim=g.attention.v_head_dim,
            rope_interleave=g.attention.rope_interleave,
        )

    def make_rotary(self, config: Any) -> nn.Module:
        return DeepseekV3RotaryEmbedding(config)

    def make_layer(self, config: Any, index: int) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = DeepseekV3Attention(config, index)
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps
        layer.mlp = DeepseekV3MLP(config)
        add_norms(layer, config, index)
        if index == 0:
            widen(layer.self_attn, "q_a_proj", "kv_a_proj_with_mqa")
        return layer
