"""Builders of tiny MTP layers, in folders of their own or inside a target's.

Each writes config.json and weights; for its arguments see `_Asked`.
"""

from pathlib import Path
from typing import Any

import tiny_shapes as shapes
from tiny import Drawn, publish, size_keys
from tiny_shapes import Shapes, named


class _Asked:
    """What is asked for, beside the arguments of `tiny.tiny_eagle3_llama`.

    Args:
        number: of the layer among the target's.
        modules: layers of this kind, one behind the other.
        experts: routed ones, in two groups; 0 = one MLP.
        tables: with the target's embedding and head, or copies of these.
        inside_target: with something of the target besides, in two shards.
        dtype: of every weight but e_score_correction_bias.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        number: int = 3,
        modules: int = 1,
        experts: int = 4,
        moe_intermediate: int = 32,
        tables: bool = True,
        inside_target: bool = False,
        dtype: str = "BF16",
        config: dict[str, Any] | None = None,
        **sizes: int,
    ) -> None:
        self.drawn, self.config = Drawn(seed, dtype), config or {}
        self.number, self.modules, self.experts = number, modules, experts
        self.inner, self.tables, self.inside = moe_intermediate, tables, inside_target
        self.keys = size_keys(dtype=dtype, num_layers=number, **sizes) | {
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "num_nextn_predict_layers": modules,
            "rms_norm_eps": 1e-05,
        }
        self.hidden, self.heads = self.keys["hidden_size"], self.keys["num_attention_heads"]

    def add_mixture(self) -> None:
        """The keys of DeepSeek's and GLM's experts."""
        self.keys |= {
            "n_routed_experts": self.experts or 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": self.inner, "n_shared_experts": 1, "n_group": 2,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        }  # fmt: skip

    def nextn(self, attention: Shapes) -> Shapes:
        """All modules, each with its copies of the tables."""
        table = (self.keys["vocab_size"], self.hidden)
        copies: Shapes = {"embed_tokens": table, "shared_head.head": table} if self.tables else {}
        layer, found = shapes.nextn(self.keys, attention, self.experts) | copies, Shapes()
        for i in range(self.modules):
            found |= named(f"model.layers.{self.number + i}.", layer)
        return found

    def of_target(self, *tables: str, root: str = "model.", body: Shapes | None = None) -> Shapes:
        """Tables of the target and, inside it, its body and its last norm."""
        return shapes.tables(self.keys, tables, root) | (
            {**(body or {}), f"{root}norm.weight": (self.hidden,)} if self.inside else {}
        )

    def write(
        self,
        folder: Path,
        found: Shapes,
        keys: dict[str, Any] | None = None,
        *,
        around: int = 1,
        sharded: bool | None = None,
    ) -> Path:
        tensors, keys = self.drawn.tensors(found, around=around), keys or self.keys | self.config
        in_two = self.inside if sharded is None else sharded
        return publish(folder, keys, tensors, sharded=in_two, tokenizer=False)


def tiny_mimo_mtp(folder: Path, **arguments: Any) -> Path:
    """Of MiMo; inside a target with a decoder layer, in one file."""
    ask = _Asked(**{"number": 1, **arguments})
    keys, hidden = ask.keys, ask.hidden
    keys |= {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "model_type": "mimo",
        "rope_theta": 640000.0,
        "use_sliding_window": False,
    }
    layer = shapes.attention(keys, hidden, biased=True) | shapes.mlp(keys)
    own: Shapes = {"input_proj": (hidden, 2 * hidden)}
    own |= {f"{name}_layernorm": (hidden,) for name in ("token", "hidden", "final")}
    found = named("model.mtp_layers.0.", layer | own)
    if ask.tables or ask.inside:
        found |= ask.of_target("embed_tokens", "lm_head", body=named("model.layers.0.", layer))
    return ask.write(folder, found, sharded=False)


def tiny_deepseek_mtp(folder: Path, *, indexer: str = "", **arguments: Any) -> Path:
    """Of DeepSeek-V3: latent attention and experts; `indexer`: of which later model it has one."""
    ask = _Asked(**arguments)
    ask.add_mixture()
    keys = ask.keys
    del keys["head_dim"]
    keys |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": ask.heads,
        "q_lora_rank": 96,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1 if ask.experts else ask.number + 1,
        "moe_layer_freq": 1,
        **ask.config,
    }
    attention = shapes.latent_attention(keys, ask.hidden)
    if indexer:
        keys |= {**DSA[indexer], "index_topk": 2048, "index_n_heads": 4, "index_head_dim": 128}
        attention |= shapes.indexer(keys, ask.hidden)
    found = ask.nextn(attention)
    return ask.write(folder, found | (ask.of_target("embed_tokens") if ask.inside else {}))


DSA: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "GLM-5.2": {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True,
    },
}  # fmt: skip
"""Models whose MTP layer has an indexer -> its keys."""


def tiny_glm4_moe_mtp(folder: Path, **arguments: Any) -> Path:
    """Of GLM-4.x: biases, head norms and experts."""
    ask = _Asked(**arguments)
    ask.add_mixture()
    ask.keys |= {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "rope_theta": 1000000.0,
    }
    attention = shapes.attention(ask.keys, ask.hidden, biased=True, normed=True)
    return ask.write(folder, ask.nextn(attention))


def tiny_qwen3_next_mtp(folder: Path, **arguments: Any) -> Path:
    """Of Qwen3-Next; without experts of Qwen3.5, with its nested config.json."""
    ask = _Asked(**{"number": 4, **arguments})
    keys, experts = ask.keys | {"attention_bias": False}, ask.experts
    del keys["num_nextn_predict_layers"], keys["rope_theta"]
    rope = {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    if experts:
        keys |= {
            **rope, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": ask.inner,
            "norm_topk_prob": True, "num_experts": experts, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 2 * ask.inner,
        }  # fmt: skip
    else:
        section = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
        keys |= {
            "model_type": "qwen3_5_text", "attn_output_gate": True, "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "rope_parameters": {**rope, **section},
        }  # fmt: skip
    found = shapes.qwen3_next_mtp(keys, experts)
    if ask.tables or ask.inside:
        root = "model." if experts else "model.language_model."
        found |= ask.of_target("embed_tokens", "lm_head", root=root)
    keys |= ask.config
    if not experts:
        outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
        keys = {**outer, "text_config": keys, "tie_word_embeddings": False}
    return ask.write(folder, found, keys, around=0)


def tiny_step3p5_mtp(folder: Path, *, window: int = 4, **arguments: Any) -> Path:
    """The modules of Step-3.5, named and declared as it was released.

    `heads` of the modules, `window` in rows, `tables` the target's embedding: heads of their own
    they always have.
    """
    ask = _Asked(**{"modules": 3, **arguments})
    keys, heads, modules, layers = ask.keys, ask.heads, ask.modules, ask.number + ask.modules
    kv_heads = keys.pop("num_key_value_heads")
    keys |= {
        "num_attention_heads": 2 * heads, "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5", "att_impl_type": "GQA",
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": heads,
            "num_attention_groups": kv_heads, "head_dim": keys["head_dim"],
        },
        "layer_types": ["full_attention", *["sliding_attention"] * (layers - 1)],
        "moe_layers_enum": "1,2", "num_attention_groups": kv_heads,
        "partial_rotary_factors": [0.5] + [1.0] * (layers - 1),
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 32.0, "original_max_position_embeddings": 1024},
        "rope_theta": [5000000.0] + [10000.0] * (layers - 1), "sliding_window": window,
        "swiglu_limits": [0.0] * layers,
        "swiglu_limits_shared": [0.0] * (ask.number - 1) + [16.0] + [0.0] * modules,
        "use_head_wise_attn_gate": True, "use_rope_layers": [],
        "yarn_only_types": ["full_attention"], "moe_num_experts": 4, "moe_top_k": 2,
        "moe_intermediate_size": 32, "share_expert_dim": 32, "norm_expert_weight": True,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
        "use_moe_router_bias": True, "need_fp32_gate": True,
    }  # fmt: skip
    found = shapes.step3p5_mtp(keys, ask.number, modules)
    found |= ask.of_target(*(["embed_tokens"] if ask.tables else []))
    return ask.write(folder, found, around=0)
