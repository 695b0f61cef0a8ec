"""The kinds of draft that can be trained: the config.json that each publishes over a target."""

from typing import Any

from ....quantize.drafts.families import (
    dflash,
    dflash2,
    dspark,
    dspark_mla,
    eagle3_llama,
    eagle3_mla,
    glm4_moe_mtp,
    mimo_mtp,
)
from .corpus import END_OF_TEXT_ID
from .draft import DraftKind
from .target import INITIALIZER_RANGE, TargetSize
from .target_kinds import KV_LORA_RANK, QK_ROPE_HEAD_DIM

_TOKENS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}


def _usual(target: TargetSize, *, attention_bias: bool = False) -> dict[str, Any]:
    """Keys that configs of transformers have, in their order."""
    return {
        "rope_theta": target.rope_theta,
        "rope_scaling": None,
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": INITIALIZER_RANGE,
        **_TOKENS,
    }


def _eagle3_llama(target: TargetSize) -> dict[str, Any]:
    """One layer with grouped-query attention; its ids stand there twice, see `_eagle3_mla`."""
    aux_layer_ids = [0, 1, 2]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 640,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        **_usual(target),
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in aux_layer_ids],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
            "use_aux_hidden_state": True,
        },
    }


def _eagle3_mla(target: TargetSize) -> dict[str, Any]:
    """One layer with MLA; names and config are those of TorchSpec's native export.

    Latent and rotary widths are the published 512 + 64: the rows of kv_a_proj_with_mqa are a
    multiple of 8 and not of 128. Norms, rotary base and yarn are the draft's own, and differ from
    the target's, so reading the wrong config shows. Auxiliary layer 1 comes first because SGLang
    0.5.23 takes the nested ids of a DeepSeek-style target as counted after the layer only then. The
    ids stand there twice:
    nested they name the layer whose output is read, as in TorchSpec's native form, at the top the
    layer that reads it, as in its vLLM form.
    """
    aux_layer_ids = [1, 2, 3]
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": target.hidden_size,
        "intermediate_size": 640,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **_TOKENS,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in aux_layer_ids],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }


def _dflash(target: TargetSize) -> dict[str, Any]:
    """Three layers in the layout of the z-lab releases; ids name the layer whose output is read.

    No text contains the end-of-text token, so the target never trained its embedding, and it is
    free to be the mask token.
    """
    num_layers = 3
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": END_OF_TEXT_ID, "target_layer_ids": [0, 1, 2]},
        "num_target_layers": target.num_hidden_layers,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": num_layers,
        **_usual(target),
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def _dflash2(target: TargetSize) -> dict[str, Any]:
    """`_dflash`, with what SpecForge's qwen3.6-27b-dflash2.json has besides, in smaller sizes."""
    config = _dflash(target)
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8}
    nested = {**config["dflash_config"], **own}
    return {**config, "architectures": ["DFlash2DraftModel"], "dflash_config": nested}


def _dspark(target: TargetSize) -> dict[str, Any]:
    """One layer over two of the target's, keys at the top level as vLLM reads them.

    No engine asks the confidence head for a fixed number of tokens: there is none.
    """
    num_layers = 1
    body = _dflash(target)
    del body["dflash_config"]
    return {
        **body,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 6,
        "mask_token_id": END_OF_TEXT_ID,
        "target_layer_ids": [0, 2],
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "max_window_layers": num_layers,
        "intermediate_size": 384,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }


def _dspark_nemotron(target: TargetSize) -> dict[str, Any]:
    """Two layers with sinks, windows and causal blocks, as Nemotron 3.5's DSpark has them.

    The window is shorter than a prompt, so that it matters.
    """
    num_layers, ids = 2, [0, 1, 2]
    nested = {
        "attention_sink_bias": True,
        "causal": True,
        "mask_token_id": END_OF_TEXT_ID,
        "sample_from_anchor": False,
        "swa_window_size": 32,
        "target_layer_ids": ids,
        "use_swa": True,
    }
    return {
        **_dspark(target),
        "attention_sink_bias": True,
        "block_size": 8,
        "dflash_config": nested,
        "dspark_bonus_anchor": True,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in ids],
        "layer_types": ["sliding_attention"] * num_layers,
        "max_window_layers": num_layers,
        "num_hidden_layers": num_layers,
        "sample_from_anchor": False,
        "sliding_window": 32,
        "target_layer_ids": ids,
        "use_sliding_window": True,
    }


def _dspark_mla(target: TargetSize) -> dict[str, Any]:
    """Three layers with latent attention, names and keys as Kimi-K3-DSpark has them.

    Its rotary base, yarn and norm eps are not the target's, as in `_eagle3_mla`.
    """
    ids = [0, 1, 2]
    yarn = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 16.0, "beta_fast": 1.0}
    yarn |= {"original_max_position_embeddings": 32, "beta_slow": 1.0}
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": target.hidden_size,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": 50000.0,
        "rope_parameters": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
        "block_size": 7,
        "num_target_layers": len(ids),
        "target_layer_ids": ids,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "mask_token_id": END_OF_TEXT_ID,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        **_TOKENS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _mimo_mtp(target: TargetSize) -> dict[str, Any]:
    """MiMo's MTP layer in a folder of its own, with the keys that its target would have.

    Its model_type is that of the layers, since transformers 5.23 knows no "mimo"; engines go by the
    architecture. Sizes, norms and rotary base are the target's, whose config vLLM builds it from.
    """
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": target.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        **_usual(target, attention_bias=True),
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


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
        **_usual(target),
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _peagle(target: TargetSize) -> dict[str, Any]:
    """Two layers as EAGLE-3 has them; no text contains the end-of-text token, which is the mask."""
    return {
        **_eagle3_llama(target),
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 2,
        "mask_token_id": END_OF_TEXT_ID,
    }


PEAGLE = DraftKind(family=eagle3_llama.FAMILY, config=_peagle, ships_tables=True)
EAGLE3_LLAMA = DraftKind(
    family=eagle3_llama.FAMILY, config=_eagle3_llama, first_layer="midlayer.", ships_tables=True
)
EAGLE3_MLA = DraftKind(
    family=eagle3_mla.FAMILY, config=_eagle3_mla, first_layer="midlayer.", ships_tables=True
)
DFLASH = DraftKind(family=dflash.FAMILY, config=_dflash)
DFLASH2 = DraftKind(family=dflash2.FAMILY, config=_dflash2)
DSPARK = DraftKind(family=dspark.FAMILY, config=_dspark)
DSPARK_NEMOTRON = DraftKind(family=dspark.FAMILY, config=_dspark_nemotron)
DSPARK_MLA = DraftKind(
    family=dspark_mla.FAMILY,
    config=_dspark_mla,
    outside={canonical[:-1]: name[:-1] for name, canonical in dspark_mla.FAMILY.prefixes},
)
_MIMO = "model.mtp_layers.0."
MIMO_MTP = DraftKind(
    family=mimo_mtp.FAMILY,
    config=_mimo_mtp,
    first_layer=_MIMO,
    outside={canonical: f"{_MIMO}{module}" for module, canonical in mimo_mtp.FAMILY.outer.items()},
)
_GLM = "model.layers.4."  # after the four of the small target
GLM4_MOE_MTP = DraftKind(
    family=glm4_moe_mtp.FAMILY,
    config=_glm4_moe_mtp,
    first_layer=_GLM,
    ships_tables=False,
    outside={
        canonical: f"{_GLM}{module}" for module, canonical in glm4_moe_mtp.FAMILY.outer.items()
    },
)
