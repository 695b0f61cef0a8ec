"""Keys of config.json that are no keys, but nearly: what they say is read by nobody."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts import Draft
from .lint import Lint

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
    norm_topk_prob
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


def misspelt_keys(draft: Draft) -> Iterator[Lint]:
    """A key beside which the right one is absent: its value is not read by anything.

    Source: no engine refuses a key that it does not know (`PretrainedConfig` keeps all of them).
    """
    config = draft.checkpoint.config
    found = {key: near for key in config if (near := near_key(key, config))}
    if found:
        yield Lint(
            name="misspelt-key",
            level="warning",
            cause=f"nothing reads {', '.join(map(repr, found))} of config.json",
            remedy="if that is what is meant, rename "
            + ", ".join(f"{key!r} to {near!r}" for key, near in found.items()),
        )
