"""config.json of published drafts, as their exporters write it, in full size or smaller.

Values that no shape determines come from templates, exporters and targets: the published files may
differ there.

Sources: TorchSpec @6f21829 `kimi_k25_eagle3.json`, `kimi_k25_eagle3_mla.json`, `convert_to_hf.py`;
ModelOpt 0.47 `hf_spec_configs.py`, `eagle/default_config.py`; SpecForge @b3d2401
`qwen3-8b-dflash.json`; transformers 5.23 `configuration_kimi_linear.py`.
"""

from collections.abc import Sequence
from typing import Any

Config = dict[str, Any]

INITIALIZER_RANGE = 0.02


def llama_config(divide: int) -> Config:
    """TorchSpec's Llama head for Kimi-K2.5; no eagle_config: aux layers are the engines' default.

    Widths, heads and vocabulary become `divide` times smaller; head widths stay.
    """
    heads, vocab = 64 // divide, 163840 // divide
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 7168 // divide,
        "intermediate_size": 12288 // divide,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(beta_fast=32.0),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        **_special_tokens(vocab, eos=163585),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
    }


def torchspec_mla_config(divide: int, *, aux_layer_ids: Sequence[int]) -> Config:
    """TorchSpec's MLA head for Kimi-K2.5 and K2.6.

    Args:
        aux_layer_ids: [1, 29, 57], counted by the layer's output; `convert_to_hf.py --vllm` counts
            the same layers by input: [2, 30, 58].
    """
    vocab = 163840 // divide
    return {
        **_mla_widths(divide),
        "draft_vocab_size": vocab,
        "eagle_config": _eagle_config(aux_layer_ids),
        **_special_tokens(vocab, eos=163585),
        "pad_token_id": 0,
    }


def modelopt_mla_config(divide: int) -> Config:
    """ModelOpt's kimik2 template: no draft_vocab_size, and keys of experts that do not exist."""
    vocab = 163840 // divide
    filled = {
        **_mla_widths(divide),
        "max_position_embeddings": 262144,
        "rope_scaling": {**_yarn(beta_fast=1.0), "rope_theta": 50000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "initializer_range": INITIALIZER_RANGE,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 0,
        "num_return_sequences": 1,
        "output_attentions": False,
        "output_hidden_states": False,
        "output_scores": False,
        "pretraining_tp": 1,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "4.51.3",
        "use_cache": True,
        **_special_tokens(vocab, eos=163586),
        "pad_token_id": vocab - 1,
        "eagle_config": {
            **_eagle_config([1, 29, 57]),
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }
    return dict.fromkeys(_EXPORTED_AS_NULL) | filled


_EXPORTED_AS_NULL = (
    *("chunk_size_feed_forward", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "id2label"),
    *("is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length"),
    *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "pruned_heads"),
    *("remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate"),
    *("sep_token_id", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p"),
    *("torchscript", "typical_p", "use_bfloat16"),
)
"""Keys of ModelOpt's template that nothing fills under transformers 5."""


def dflash_config(divide: int) -> Config:
    """z-lab's DFlash for Kimi-Linear-48B-A3B: 5 layers, blocks of 16.

    32 heads of 72 are what the target's own config says; the published byte total allows only
    a few other head counts.
    """
    heads, vocab = 32 // divide, 163840 // divide
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [3, 7, 15, 19, 23]},
        "num_target_layers": 27,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "hidden_size": 2304 // divide,
        "intermediate_size": 9216 // divide,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 72,
        "vocab_size": vocab,
        "max_position_embeddings": 1048576,
        "max_window_layers": 5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        **_special_tokens(vocab, eos=163586),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
    }


def _special_tokens(vocab: int, *, eos: int) -> Config:
    """Kimi's tokens, or the last ones of a smaller vocabulary."""
    return {"bos_token_id": min(163584, vocab - 2), "eos_token_id": min(eos, vocab - 1)}


def _yarn(*, beta_fast: float) -> Config:
    return {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _mla_widths(divide: int) -> Config:
    """What TorchSpec's and ModelOpt's MLA heads have in common."""
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168 // divide,
        "intermediate_size": 18432 // divide,
        "num_hidden_layers": 1,
        "num_attention_heads": 64 // divide,
        "num_key_value_heads": 64 // divide,
        "q_lora_rank": 1536 // divide,
        "kv_lora_rank": 512 // divide,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840 // divide,
        "torch_dtype": "bfloat16",
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(beta_fast=1.0),
    }


def _eagle_config(aux_layer_ids: Sequence[int]) -> Config:
    return {
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
