"""The kinds of MTP layer with experts that can be trained, beside `draft_kinds`."""

from typing import Any

from ....quantize.drafts.families import glm4_moe_mtp
from .corpus import END_OF_TEXT_ID
from .draft import DraftKind
from .target import INITIALIZER_RANGE, TargetSize


def _glm4_moe_mtp(target: TargetSize) -> dict[str, Any]:
    """GLM's MTP layer in a folder of its own: a token sees two of eight experts and a shared one.

    Sizes, norms and rotary base are the target's, whose config engines build the layer from.
    """
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_hidden_layers": target.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": target.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


_OWN = "model.layers.4."  # behind the four of the small target
GLM4_MOE_MTP = DraftKind(
    family=glm4_moe_mtp.FAMILY,
    config=_glm4_moe_mtp,
    first_layer=_OWN,
    ships_tables=False,
    outside={
        canonical: f"{_OWN}{module}" for module, canonical in glm4_moe_mtp.FAMILY.outer.items()
    },
)
