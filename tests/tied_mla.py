"""An MLA draft that is tied to the target of tied_pair.py by construction; see there.

The latents carry the embedding and the value that the Llama draft of that pair computes, so it
attends to its own row and reads that row's embedding, through norms, ranks and a rotated part whose
key all heads share. Values are narrower than keys.
"""

from pathlib import Path
from typing import Any

import torch
from tied_pair import DRAFT_KEYS, HIDDEN, Noise, write_layers
from torch import Tensor
from transformers import LlamaForCausalLM

HEADS, ROPE = 2, 16
MLA_KEYS: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "num_attention_heads": HEADS,
    "q_lora_rank": HIDDEN,
    "kv_lora_rank": 2 * HIDDEN,
    "qk_nope_head_dim": HIDDEN,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": HIDDEN,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 1.0),
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
    },
}


def save_mla_draft(folder: Path, target: Path, *, seed: int = 1, **config: Any) -> Path:
    """Write an MLA draft of the target (bfloat16 safetensors); `config` overrides config.json."""
    model = LlamaForCausalLM.from_pretrained(target)
    keys = {**DRAFT_KEYS, "rope_theta": 50000.0, **MLA_KEYS, **config}
    return write_layers(folder, keys, model, seed, _attention_weights, _later_attention_weights)


def _attention_weights(noise: Noise) -> dict[str, Tensor]:
    eye, zero = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    # Of a head: the plain part of the query is the embedding, the rotated part is random.
    query = torch.cat([0.5 * eye, 3 * noise(ROPE, HIDDEN)])
    key_value = torch.cat([torch.cat([eye, zero], 1), torch.cat([zero, eye], 1)])
    value = torch.cat([eye, -0.75 * eye], 1)
    latent = torch.cat([torch.cat([eye, zero], 1), value, 3 * noise(ROPE, 2 * HIDDEN)])
    return {
        "q_a_proj": torch.cat([eye, zero], 1) + noise(HIDDEN, 2 * HIDDEN) / 2,
        "q_a_layernorm": torch.ones(HIDDEN),
        "q_b_proj": torch.cat([query] * HEADS) + noise(HEADS * (HIDDEN + ROPE), HIDDEN) / 2,
        "kv_a_proj_with_mqa": latent + noise(2 * HIDDEN + ROPE, 2 * HIDDEN) / 2,
        "kv_a_layernorm": torch.ones(2 * HIDDEN),
        "kv_b_proj": torch.cat([key_value] * HEADS) + noise(HEADS * 2 * HIDDEN, 2 * HIDDEN) / 2,
        "o_proj": torch.cat([0.5 * eye] * HEADS, 1) + noise(HIDDEN, HEADS * HIDDEN),
    }


def _later_attention_weights(noise: Noise) -> dict[str, Tensor]:
    """Random: the layer disturbs what layer 0 knows, so that some of it is accepted no more."""
    return {
        "q_a_proj": noise(HIDDEN, HIDDEN) * 2,
        "q_a_layernorm": torch.ones(HIDDEN),
        "q_b_proj": noise(HEADS * (HIDDEN + ROPE), HIDDEN) * 2,
        "kv_a_proj_with_mqa": noise(2 * HIDDEN + ROPE, HIDDEN) * 2,
        "kv_a_layernorm": torch.ones(2 * HIDDEN),
        "kv_b_proj": noise(HEADS * 2 * HIDDEN, 2 * HIDDEN),
        "o_proj": noise(HIDDEN, HEADS * HIDDEN) * 8,
    }
