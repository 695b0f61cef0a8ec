"""Keys of config.json that anything reads, and what is nearly one of them."""

import difflib
from collections.abc import Mapping
from typing import Any

_KEYS = """
    architectures model_type dtype torch_dtype transformers_version auto_map bos_token_id
    eos_token_id pad_token_id tie_word_embeddings use_cache initializer_range
    attention_dropout hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act mlp_bias attention_bias rms_norm_eps vocab_size
    draft_vocab_size max_position_embeddings max_window_layers sliding_window
    use_sliding_window layer_types rope_theta rope_scaling rope_parameters rope_interleave
    partial_rotary_factor target_hidden_size target_model_type num_target_layers
    norm_before_residual norm_before_fc norm_output fc_norm use_aux_norm eagle_config
    dflash_config eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids
    use_aux_hidden_state target_layer_ids mask_token_id block_size is_causal causal
    parallel_drafting pard_token q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
    v_head_dim quantization_config speculators_model_type speculators_version
    speculators_config transformer_layer_config num_nextn_predict_layers n_routed_experts
    num_experts num_experts_per_tok moe_intermediate_size n_shared_experts
    first_k_dense_replace routed_scaling_factor scoring_func topk_method n_group topk_group
    norm_topk_prob conv_kernel_size conv_group_size selector_rank selector_top_k projector_type
    markov_rank markov_head_type enable_confidence_head sample_from_anchor shift_label
    pure_draft_prefix_len gru_hidden_dim emb_dim num_heads medusa_num_heads num_medusa_heads
    medusa_num_layers num_medusa_layers medusa_fc_bias original_lm_head truncated_vocab_size
    partial_rotary_factors num_attention_groups attention_other_setting moe_layers_enum
    yarn_only_types swiglu_limits swiglu_limits_shared use_rope_layers use_head_wise_attn_gate
    mtp_layer_types num_sliding_attention_heads
"""
KNOWN = frozenset(_KEYS.split())
"""Keys that trainers write and engines read, at the top level and in sections."""
_NEAR = 0.88


def near_key(key: str, config: Mapping[str, Any]) -> str | None:
    """The known key that one of a config is nearly, where that one is absent; else None."""
    if key in KNOWN:
        return None
    near = difflib.get_close_matches(key, KNOWN - config.keys(), n=1, cutoff=_NEAR)
    return near[0] if near else None


def misspelling_of(key: str, config: Mapping[str, Any]) -> str | None:
    """A key of a config that is nearly this one, and itself none; None where there is none."""
    unread = [other for other in config if other not in KNOWN]
    near = difflib.get_close_matches(key, unread, n=1, cutoff=_NEAR)
    return near[0] if near else None
