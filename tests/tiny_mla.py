"""Builder of tiny EAGLE-3 MLA drafts, in TorchSpec's and in ModelOpt's form; see tiny.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny import Drawn, optional, publish, size_keys
from tiny_shapes import eagle3

MODELOPT_EXTRAS: dict[str, Any] = {
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "head_dim": None,
    "moe_intermediate_size": 48, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
}  # fmt: skip
"""Keys that ModelOpt's export keeps from its template: a mixture of experts that is not there."""

LATENT = {"q_lora_rank": 48, "kv_lora_rank": 136, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
          "v_head_dim": 32}  # fmt: skip
"""Like the published 576 (512 + 64), the rows of kv_a_proj_with_mqa are 152 (136 + 16): more than
128, a multiple of 8 and not of 128.
"""


def tiny_eagle3_mla(
    folder: Path,
    *,
    seed: int = 0,
    architecture: str = "Eagle3DeepseekV2ForCausalLM",
    prefix: str = "midlayer.",
    sharded: bool = False,
    embed: bool = True,
    head: bool = True,
    pruned_vocabulary: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    modelopt: bool = False,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a tiny EAGLE-3 MLA draft: config.json, weights and two tokenizer files.

    Args: see `tiny_eagle3_llama`, and

        fc_norm, norm_before_fc, norm_output: options of EAGLE-3.1, with the norms they need.
        modelopt: as ModelOpt exports: "layers.0.*", no embed_tokens, no `draft_vocab_size`, the
            keys of a mixture of experts, d2t without t2d.
    """
    if modelopt:
        prefix, embed = "layers.0.", False
    latent = {name: sizes.pop(name, size) for name, size in LATENT.items()}
    keys = size_keys(dtype=dtype, **sizes)
    vocab = keys["vocab_size"]
    del keys["head_dim"], keys["tie_word_embeddings"]
    keys |= latent | {
        "architectures": [architecture],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "hidden_act": "silu",
        "model_type": "kimi_k2",
        "num_key_value_heads": keys["num_attention_heads"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 1.0),
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
    }
    cut = pruned_vocabulary
    has = optional(embed_tokens=embed, lm_head=head, d2t=cut, t2d=cut and not modelopt)
    has |= optional(fc_norm=fc_norm, input_norm=norm_before_fc)
    asked = optional(fc_norm=fc_norm, norm_before_fc=norm_before_fc, norm_output=norm_output)
    own = vocab // 2 if cut else vocab
    shapes = eagle3(keys | {"draft_vocab_size": own}, has, prefix, latent=True)
    tensors = Drawn(seed, dtype).tensors(shapes, vocab=vocab)
    keys |= MODELOPT_EXTRAS if modelopt else {"draft_vocab_size": own}
    keys |= dict.fromkeys(asked, True) | dict(config or {})
    return publish(folder, keys, tensors, sharded=sharded)
