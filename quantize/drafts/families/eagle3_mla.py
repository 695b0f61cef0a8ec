"""EAGLE-3 with multi-head latent attention: the kind of kimi-k2.5-eagle3-mla.

TorchSpec writes `midlayer.*`, or `layers.0.*` for vLLM; ModelOpt writes `layers.0.*` without
embed_tokens and `draft_vocab_size`. The keys of a mixture of experts that ModelOpt's config keeps
from its template mean nothing: every engine builds one dense MLP.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ..config_reader import ConfigReader
from ..eagle3 import Eagle3, Shapes, read_common
from ..eagle3_geometry import Eagle3MlaGeometry
from ..family import Dim
from ..rope import RopeConfig, Unreplayed

if TYPE_CHECKING:
    from ..mla_forward import MlaAttention


class Eagle3Mla(Eagle3):
    """The EAGLE-3 MLA family with all its name variants.

    vLLM 0.33 knows both architectures and serves one class for them, SGLang 0.5.23 the first.
    """

    name = "eagle3-mla"
    architectures = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")

    def recognises(self, canonical_names: Collection[str]) -> bool:
        """A hidden_norm and the latent down-projection in layer 0."""
        return {
            "layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "layers.0.hidden_norm.weight",
        } <= set(canonical_names)

    def read_geometry(self, config: Mapping[str, Any], where: object) -> Eagle3MlaGeometry:
        """See `Family.read_geometry`."""
        keys = ConfigReader(config, where)
        common = read_common(config, where, self.name)
        geometry = Eagle3MlaGeometry(
            **common | {"rope": _of_latent_attention(common["rope"], where)},
            q_lora_rank=keys.positive("q_lora_rank"),
            kv_lora_rank=keys.positive("kv_lora_rank"),
            qk_nope_head_dim=keys.positive("qk_nope_head_dim"),
            qk_rope_head_dim=keys.positive("qk_rope_head_dim"),
            v_head_dim=keys.positive("v_head_dim"),
            rope_interleave=keys.flag("rope_interleave", True),
        )
        if geometry.qk_rope_head_dim % 2:
            raise CheckpointError(
                where,
                f"qk_rope_head_dim: expected an even number, got {geometry.qk_rope_head_dim}:"
                " dimensions are rotated in pairs",
                fix="correct 'qk_rope_head_dim'",
            )
        return geometry

    def attention_shapes(self, geometry: Eagle3MlaGeometry, width: Dim) -> Shapes:
        """See `Eagle3.attention_shapes`."""
        g, heads = geometry, geometry.num_attention_heads
        hidden = Dim(g.hidden_size, "hidden_size")
        q_latent = Dim(g.q_lora_rank, "q_lora_rank")
        kv_latent = Dim(g.kv_lora_rank, "kv_lora_rank")
        queries = Dim(
            heads * (g.qk_nope_head_dim + g.qk_rope_head_dim),
            "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
        )
        keys_values = Dim(
            heads * (g.qk_nope_head_dim + g.v_head_dim),
            "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
        )
        values = Dim(heads * g.v_head_dim, "num_attention_heads x v_head_dim")
        down = Dim(g.kv_lora_rank + g.qk_rope_head_dim, "kv_lora_rank + qk_rope_head_dim")
        return {
            "self_attn.q_a_proj": ("attention", (q_latent, width)),
            "self_attn.q_a_layernorm": ("norm", (q_latent,)),
            "self_attn.q_b_proj": ("attention", (queries, q_latent)),
            "self_attn.kv_a_proj_with_mqa": ("attention", (down, width)),
            "self_attn.kv_a_layernorm": ("norm", (kv_latent,)),
            "self_attn.kv_b_proj": ("kv_up", (keys_values, kv_latent)),
            "self_attn.o_proj": ("attention", (hidden, values)),
        }

    def attention(self, geometry: Eagle3MlaGeometry) -> "MlaAttention":
        """See `Eagle3.attention`."""
        from ..mla_forward import MlaAttention

        return MlaAttention(geometry)


def _of_latent_attention(rope: RopeConfig, where: object) -> RopeConfig:
    """A rope that engines serve alike: plain, or DeepSeek's yarn, which any other type becomes.

    Source: `deepseek_v2.py` of vLLM 0.33 (1115) and SGLang 0.5.23 (2066).
    """
    if rope.yarn is not None and rope.yarn.attention_factor is not None:
        what = (
            "attention_factor: expected none, as engines disagree about it in an MLA draft"
            " (SGLang 0.5.23 ignores it, vLLM 0.33 leaves the softmax unscaled where it is 1)"
        )
        fix = "give mscale and mscale_all_dim, from which the factor follows"
    elif rope.scaling is not None and not isinstance(rope.scaling, Unreplayed):
        what = "rope type: expected 'default' or 'yarn': engines take any other one for yarn"
        fix = "replay it under the scaling that it was trained with, if that is one of the two"
    else:
        return rope
    return RopeConfig(
        theta=rope.theta, yarn=None, scaling=Unreplayed(where=str(where), what=what, fix=fix)
    )


FAMILY = Eagle3Mla()
