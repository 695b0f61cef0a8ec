"""The kinds of target that can be trained: how a size becomes a transformers config."""

from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from .corpus import END_OF_TEXT_ID
from .target import INITIALIZER_RANGE, TargetKind, TargetSize

KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64


def _llama(size: TargetSize) -> LlamaConfig:
    return LlamaConfig(
        **_common(size), num_key_value_heads=size.num_key_value_heads, head_dim=size.head_dim
    )


def _qwen3(size: TargetSize) -> Qwen3Config:
    """Llama with norms on queries and keys."""
    return Qwen3Config(
        **_common(size), num_key_value_heads=size.num_key_value_heads, head_dim=size.head_dim
    )


def _deepseek_v3(size: TargetSize) -> DeepseekV3Config:
    """MLA with interleaved rotary pairs, and a dense MLP in every layer.

    Every head has its own keys and values, so `size.num_key_value_heads` has no meaning. The
    latent and rotary widths are those of all published models, 512 + 64: engines have attention
    kernels for no others. No layer has experts: their keys are there because the config wants
    values.
    """
    common = _common(size) | {"rope_parameters": _yarn(size)}
    return DeepseekV3Config(
        **common,
        num_key_value_heads=size.num_attention_heads,
        q_lora_rank=size.hidden_size // 2,
        kv_lora_rank=KV_LORA_RANK,
        qk_nope_head_dim=size.head_dim,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        v_head_dim=size.head_dim,
        first_k_dense_replace=size.num_hidden_layers,
        moe_intermediate_size=size.intermediate_size,
        n_routed_experts=1,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
    )


def _yarn(size: TargetSize) -> dict[str, Any]:
    """As published; factor and betas differ from the draft's, so that confusing the two shows.

    vLLM 0.32 computes plain angles of MLA wrongly on a CPU: its kernel takes the heads
    for tokens.
    """
    return {
        "rope_type": "yarn",
        "rope_theta": size.rope_theta,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _common(size: TargetSize) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_hidden_layers,
        "num_attention_heads": size.num_attention_heads,
        "max_position_embeddings": size.max_position_embeddings,
        "rms_norm_eps": size.rms_norm_eps,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "tie_word_embeddings": False,
    }


LLAMA = TargetKind(name="llama", config=_llama)
QWEN3 = TargetKind(name="qwen3", config=_qwen3)
DEEPSEEK_V3 = TargetKind(
    name="deepseek_v3", config=_deepseek_v3, small_norms=("kv_a_layernorm.weight",)
)
