"""What no family reads: of each fault of config.json or tensors the place, what it is, a fix."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_draft
from by_recipe import draft_of
from draftquant.quantize.engines.contract import ENGINE_NAMES
from draftquant.recipes.errors import CheckpointError
from tiny import Stored, change, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark, tiny_dspark_mla
from tiny_llama import tiny_language_model, with_mask_hidden
from tiny_mla import tiny_eagle3_mla
from tiny_mtp import (
    tiny_deepseek_mtp,
    tiny_glm4_moe_mtp,
    tiny_mimo_mtp,
    tiny_qwen3_next_mtp,
    tiny_step3p5_mtp,
)
from tiny_speculators import BUILD

LANGUAGE_MODELS = ("Llama", "Qwen2", "Qwen3")
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "llama": tiny_eagle3_llama,
    "two": partial(tiny_eagle3_llama, num_layers=2),
    "pruned": partial(tiny_eagle3_llama, pruned_vocabulary=True),
    "mla": tiny_eagle3_mla,
    "mla-two": partial(tiny_eagle3_mla, num_layers=2),
    "mla-pruned": partial(tiny_eagle3_mla, modelopt=True, pruned_vocabulary=True),
    "peagle": lambda folder: with_mask_hidden(tiny_eagle3_llama(folder, prefix="layers.0.")),
    "dflash": partial(tiny_dflash, num_layers=2),
    "dflash-pruned": partial(tiny_dflash, num_layers=1, pruned_vocabulary=True),
    "dflash2": partial(tiny_dflash, kind="dflash2", num_layers=1),
    "dspark": partial(tiny_dspark, num_layers=1),
    "dspark-mla": tiny_dspark_mla,
    "mimo": tiny_mimo_mtp,
    "deepseek": tiny_deepseek_mtp,
    "glm": tiny_glm4_moe_mtp,
    "qwen3-next": tiny_qwen3_next_mtp,
    "qwen3.5": partial(tiny_qwen3_next_mtp, experts=0),
    "step": tiny_step3p5_mtp,
    **{f"{kind} model": partial(tiny_language_model, kind=kind) for kind in LANGUAGE_MODELS},
    **{f"speculators-{name}": build for name, build in BUILD.items()},
}
FULL, SLIDING = "full_attention", "sliding_attention"
IDS, AUX = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
NAME = "expected a list of one name, got "
WHOLE, ORDER = "a positive whole number, got ", "distinct layer numbers in ascending order"
ADD, EXPORT, OTHER = "as the draft was trained with", "export the draft again", "that belongs to"
TYPES = "supported: dflash, dflash2, dspark, eagle3"

CONFIGS: Mapping[str, Sequence[tuple[dict[str, Any], str, str]]] = {
    "llama": (
        ({"architectures": ["GPT2LMHeadModel"]}, "no supported draft family has 'GPT2LMHead", ""),
        ({"architectures": ["a", "b"]}, NAME + "['a', 'b']", ""),
        ({"architectures": None}, NAME + "no such key", "set architectures to LlamaForCausalLMEag"),
        ({"model_type": "eagle", "model": {"hidden_size": 64, "architectures": ["A"]}},
         "stand below 'model'", "move the keys of 'model' to the top level"),
        ({"attention_bias": True}, "attention_bias: expected false, got true", "cannot be quanti"),
        ({"hidden_act": "gelu"}, "expected 'silu', as eagle3-llama is served", "another draft"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers, but 14 tensors", "correct 'num_hid"),
        *(({key: None}, f"{key}: missing key", f"add '{key}' {ADD}") for key in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")),
        *(({"hidden_size": value}, f"hidden_size: expected {WHOLE}", "correct 'hidden_size'")
          for value in (0, 64.0, "64", True)),
        *(({"rms_norm_eps": value}, "rms_norm_eps: expected a positive number", "correct")
          for value in (0, "x", -(10**40))),
        *(({"eagle_config": {IDS: ids}}, f"{IDS}: expected {ORDER}", "correct")
          for ids in ([3, 1], [-1], [True], "1")),
        ({"eagle_config": {"use_aux_hidden_state": False}, "target_hidden_size": 32},
         "false needs a target as wide as the draft: 32 is not 64", ""),
        ({"eagle_config": {IDS: [2, 30]}}, "fc.weight: expected shape [64, 128], got", ""),
        ({"fc_norm": True}, "3 tensor(s) of eagle3-llama are missing: fc_norm.0.weight", EXPORT),
        ({IDS: [2, 3, 4], "eagle_config": {IDS: [0, 1, 2]}}, "are not the same layers", ""),
    ),
    "two": (({"num_hidden_layers": 36}, "36 layers, but", "the tensors are those of 2 layer(s)"),),
    "pruned": (({"draft_vocab_size": None}, "d2t: expected shape [96], got [48] (disagrees", ""),),
    "peagle": tuple(
        ({"mask_token_id": token}, "expected a token of the vocabulary of 96", "correct")
        for token in (96, -1, True, "7")
    ),
    "mla": (
        ({"kv_lora_rank": None}, "kv_lora_rank: missing key", f"add 'kv_lora_rank' {ADD}"),
        ({"qk_rope_head_dim": 15}, "expected an even number, got 15", "correct 'qk_rope"),
        ({"rope_scaling.mscale_all_dim": -1.0}, "mscale_all_dim: expected a positive number", ""),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "those of eagle3-mla",
         "set architectures to Eagle3DeepseekV2ForCausalLM, whose tensors these are"),
    ),
    "mla-pruned": (({}, "d2t: expected shape [96], got [48] (disagrees with draft_vocab", OTHER),),
    "dflash": (
        ({"dflash_config.target_layer_ids": None}, "missing key (engines guess", ""),
        ({"dflash_config.mask_token_id": 96}, "expected a token id in [0, 96), got 96", ""),
        ({"dflash_config.block_size": 1}, "at least 2, an anchor and a mask, got 1", ""),
        ({"layer_types": [FULL, SLIDING]}, "sliding_window: missing key", ""),
        ({IDS: [1, 3, 5]}, f"{IDS}: expected target_layer_ids + 1, got [1, 3, 5]", ""),
        ({"dflash_config.use_swa": True}, "sliding_window: missing key", ""),
        ({"attention_sink_bias": True}, "True at the top level, but engines read", "both places"),
        *(({key: True}, "2 tensor(s) of dflash are missing: layers.0.self_attn.attention_sink_b",
           EXPORT) for key in ("dflash_config.attention_sink_bias", "add_swa_attention_sink_bias")),
        ({"dflash_config.attention_value_scale": 0}, "expected a positive number, got 0", ""),
        *(({place + key: value}, f"{key}: expected ", "no supported family computes this")
          for key, value, place in (
            ("attention_bias", True, ""), ("mlp_bias", True, ""), ("hidden_act", "gelu", ""),
            ("use_gemma_norm", True, ""), ("is_neox_style", False, ""),
            ("use_aux_hidden_state", False, ""), ("sample_from_anchor", True, ""),
            ("shift_label", True, "dflash_config."), ("projector_type", "gru", "dflash_config."),
            ("conv_kernel_size", 4, "dflash_config."), ("selector_rank", 16, "dflash_config."),
            ("markov_rank", 16, "dflash_config."), ("kv_lora_rank", 512, ""))),
    ),
    "dflash2": (
        ({"dflash_config.conv_kernel_size": None}, "conv_kernel_size: missing key", ""),
        ({"dflash_config.selector_top_k": 97}, "expected at most vocab_size 96", ""),
        ({"dflash_config.final_logit_softcapping": -3}, "softcapping: expected a pos", ""),
        ({"draft_vocab_size": 48}, "expected vocab_size 96, got 48", "no engine serves"),
        ({"dflash_config.conv_group_size": 7}, "expected a divisor of hidden_size 64", ""),
    ),
    "dspark-mla": (
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, "expected no sliding_attention", ""),
    ),
    "dspark": (
        ({"markov_rank": None}, "markov_rank: missing key", ""),
        ({"markov_rank": 24}, "(disagrees with ", ""),
        ({"markov_head_type": "gated"}, "markov_head_type: expected 'vanilla', got 'gated'", ""),
        *(({f"dflash_config.{key}": 8}, f" beside dflash_config.{key}: 8", "")
          for key in ("markov_rank", "markov_head_type", "enable_confidence_head")),
        *(({f"dspark_{key}": [7]}, f" beside dspark_{key}: [7]", "")
          for key in ("block_size", "markov_rank", "markov_head_type", "target_layer_ids",
                      "noise_token_id")),
        ({"dspark_bonus_anchor": True}, "True at the top level, where engines read it, but", ""),
    ),
    "mimo": (
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers: expected 1", ""),
        ({"num_nextn_predict_layers": 0}, "this is a whole model without an MTP layer", ""),
        ({"use_sliding_window": True}, "use_sliding_window: expected false, got true", ""),
        ({"hidden_act": "gelu"}, "expected 'silu', as mimo-mtp is served", "another draft"),
        *(({"num_hidden_layers": value}, f"num_hidden_layers: expected {WHOLE}", "")
          for value in ("x", [None])),
    ),
    "deepseek": (
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'", ""),
        ({"topk_group": 3}, "cannot be chosen from 3 of 2 groups", ""),
        ({"first_k_dense_replace": "x"}, f"first_k_dense_replace: expected {WHOLE}", ""),
        ({"n_group": 4}, "cannot be chosen from 1 of 4 groups", ""),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "3 of 4 experts cannot be", ""),
        ({"architectures": ["Glm4MoeForCausalLM"]}, "but the tensors are those of deep", ""),
    ),
    "glm": (
        ({"partial_rotary_factor": 1.5}, "expected at most 1, got 1.5", ""),
        ({"n_routed_experts": 8}, "expected shape [8], got [4] (disagrees with n_routed", ""),
    ),
    "qwen3-next": (
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most num_experts, 4", ""),
        ({"shared_expert_intermediate_size": 32}, "disagrees with the width of the shared", ""),
        ({"mlp_only_layers": [0]}, "experts.0.down_proj.weight: no tensor of qwen3-next", ""),
    ),
    "qwen3.5": (
        ({"text_config.attn_output_gate": False}, "attn_output_gate: expected True, got Fal", ""),
        ({"text_config.attention_bias": True}, "attention_bias: expected False", ""),
    ),
    "step": (
        *(({"layer_types": kind}, f"expected '{SLIDING}' or '{FULL}', got ", "no engine serves")
          for kind in (["x"] * 6, None)),
        ({"layer_types": [FULL] * 3, "mtp_layer_types": [FULL, FULL, SLIDING]},
         f"of all modules, got ['{FULL}', '{FULL}', '{SLIDING}']", ""),
        ({"num_sliding_attention_heads": 3}, "g_proj.weight: expected shape", ""),
        ({"attention_other_setting.attention_type": "x"}, "g_proj.weight: expected shape", ""),
        ({"layer_types": [FULL] * 4}, "layer_types: expected a list over 3 layers", ""),
        ({"layer_types": [*[SLIDING] * 4, FULL, FULL]}, "expected the same of all modules", ""),
        ({"moe_layers_enum": "1,2,4"}, "moe_layers_enum: asks of the layers 3 to 5", ""),
        ({"partial_rotary_factors": [0.25] * 6}, "partial_rotary_factors: expected 0.5 or 1", ""),
        ({"rope_theta": [1e4, 1e4, 1e4, 1e4, 1e6, 1e4]}, "rope_theta: expected the same", ""),
        ({"sliding_window": None}, "sliding_window: missing key", ""),
        ({"num_nextn_predict_layers": 2}, "no tensor of step3p5-mtp", ""),
        *(({key: 7}, f"{key}: expected a list, got 7", "") for key in (
            "yarn_only_types", "moe_layers_enum", "swiglu_limits_shared", "use_rope_layers",
            "mlp_layer_types", "mtp_mlp_layer_types")),
    ),
    "Qwen3 model": (({"attention_bias": True}, "attention_bias: expected false, got true", ""),),
    "Qwen2 model": (
        ({"head_dim": 32}, "head_dim: expected hidden_size / num_attention_heads = 16", ""),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True", ""),
    ),
    "Llama model": (({"vocab_size": 97}, "expected shape [97, 64], got [96, 64]", ""),),
    "speculators-eagle3-llama": (
        ({"transformer_layer_config": None}, "transformer_layer_config: missing key", "save the"),
        ({"speculators_model_type": None}, "speculators_model_type: missing key", TYPES),
        ({"speculators_model_type": [1]}, "speculators_model_type: [1] is not supported", TYPES),
        ({"speculators_model_type": "dflash"}, "expected ['DFlashSpeculator'], got ['Eagle3Spec",
         "correct the one"),
        ({"norm_before_fc": True, "fc_norm": True}, "are both true", "keep the one"),
        ({IDS: [0, 4]}, f"{IDS}: expected ids from 1 (the output of layer 0)", "not supported"),
        ({"transformer_layer_config.model_type": "gemma3_text"},
         "transformer_layer_config: model_type: expected 'llama' or 'qwen3'", ""),
    ),
    "speculators-eagle3-qwen3": (
        ({"transformer_layer_config.rms_norm_eps": None},
         "transformer_layer_config: rms_norm_eps: missing key", ""),
        ({"transformer_layer_config.layer_types": ["linear_attention"]},
         "layer_types: expected full_attention or sliding_attention for every layer", ""),
    ),
    "speculators-dflash": (
        ({AUX: None}, f"{AUX}: missing key", f"add '{AUX}'"),
        ({"sample_from_anchor": True}, "expected false, got true", "vLLM refuses it"),
    ),
}  # fmt: skip
Q, LATENT = "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.{}.weight"
TENSORS: Mapping[str, Sequence[tuple[str, tuple[int, ...] | None, str, str]]] = {
    "llama": (
        (Q, (64, 64), "expected shape [64, 128], got [64, 64] (disagrees with 2 x hidden", OTHER),
        ("lm_head.weight", (95, 64), "(disagrees with draft_vocab_size", OTHER),
        ("midlayer.mlp.up_proj.weight", None, "are missing: layers.0.mlp.up_proj", EXPORT),
        ("midlayer.self_attn.q_porj.weight", (64,), "nearest: layers.0.self_attn.q", "remove"),
        ("layers.0.self_attn.q_proj.weight", (64, 128), f"{Q} and layers.0.self_attn", "one"),
        ("", (64,), "has this name; nearest: none", "remove"),
    ),
    "pruned": (("d2t", None, "1 tensor(s) of eagle3-llama are missing: d2t", EXPORT),),
    "peagle": (("mask_hidden", (1, 1, 64), "expected shape [1, 1, 192], got [1, 1, 64]", OTHER),),
    "mla": (
        (LATENT.format("q_b_proj"), (128, 48), "x (qk_nope_head_dim + qk_rope_head_dim)", OTHER),
        (LATENT.format("kv_b_proj"), (160, 136), "x (qk_nope_head_dim + v_head_dim)", OTHER),
    ),
    "mla-two": (("layers.1.self_attn.kv_a_proj_with_mqa.weight", (152, 8), "shape [152, 64]", ""),),
    "dflash": (
        ("layers.1.self_attn.k_proj.weight", (128, 64), "num_key_value_heads x head_dim", OTHER),
        ("layers.0.self_attn.q_proj.bias", (128,), "no tensor of dflash has this name", "remove"),
    ),
    "dflash-pruned": (
        ("lm_head.weight", None, "1 tensor(s) of dflash are missing: lm_head", EXPORT),
    ),
}  # fmt: skip


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        draft_of(folder)
    assert caught.value.where.startswith(str(folder))
    assert what in f"{caught.value.where}: {caught.value.what}"
    assert fix in caught.value.fix
    assert caught.value.fix


def without_maths(folder: Path, notice: str) -> None:
    family = draft_of(folder).family
    assert family.name == "unknown"
    assert notice in str(family.notice)


def edit(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of config.json, dotted ones in their sections; None takes one out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        keys = config.setdefault(section, {}) if section else config
        keys[key] = value
        if value is None:
            del keys[key]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def bf16(shape: tuple[int, ...]) -> Stored:
    return Stored("BF16", shape, bytes(2 * prod(shape)))


@pytest.mark.parametrize("build", CONFIGS)
def test_a_config_that_is_none_of_its_family(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    before = (folder / "config.json").read_bytes()
    for changes, what, fix in CONFIGS[build]:
        edit(folder, changes)
        refused(folder, what, fix)
        (folder / "config.json").write_bytes(before)


@pytest.mark.parametrize("build", TENSORS)
def test_tensors_that_are_none_of_their_config(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    before = read_tensors(folder)
    for name, shape, what, fix in TENSORS[build]:
        change(folder, **{name: None if shape is None else bf16(shape)})
        refused(folder, what, fix)
        write_tensors(folder, before)


SEVERAL: Mapping[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "peagle": ({"mask_token_id": 3, "pard_token": 5, "ptd_token_id": 7},
               lambda geometry: geometry.mask_token_id),
    "dflash": ({"is_causal": True, "dflash_config.causal": False},
               lambda geometry: geometry.causal),
}  # fmt: skip
"""Keys that say one thing, in the order in which engines look for them, and what is read."""


@pytest.mark.parametrize("build", SEVERAL)
def test_of_keys_that_say_one_thing_the_first_counts(build: str, tmp_path: Path) -> None:
    folder = BUILDERS[build](tmp_path / "draft")
    keys, read = SEVERAL[build]
    edit(folder, keys)
    for key, value in keys.items():
        assert read(draft_of(folder).geometry) == value, key
        edit(folder, {key: None})


LLAMA, EAGLE3, DFLASH = "LlamaForCausalLM", "LlamaForCausalLMEagle3", "DFlashDraftModel"
EARLIER: Mapping[str, Sequence[tuple[dict[str, Any], str]]] = {
    "Medusa": (
        ({"architectures": ["MedusaModel"]}, "x"),
        ({"architectures": None, "medusa_num_heads": 2}, "0.0.linear.weight"),
    ),
    "EAGLE-1": (
        ({"architectures": ["EagleLlamaForCausalLM"]}, "x"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "x"),
        ({"architectures": [LLAMA]}, "model.fc.weight"),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, "x"),
    ),
    "Domino": (
        ({"architectures": ["DominoDraftModel"]}, "x"),
        ({"architectures": [DFLASH], "dflash_config": {"projector_type": "domino"}}, "x"),
        ({"architectures": [DFLASH]}, "prefix_gru.weight_ih_l0"),
    ),
}


@pytest.mark.parametrize("kind", EARLIER)
def test_a_draft_that_no_family_reads_is_told_what_it_is(kind: str, tmp_path: Path) -> None:
    for i, (keys, tensor) in enumerate(EARLIER[kind]):
        folder = tiny_eagle3_llama(tmp_path / str(i))
        edit_json(folder / "config.json", **keys)
        write_tensors(folder, {tensor: bf16((1,))})
        without_maths(folder, f"no maths of this draft ({kind})")
        for engine in ENGINE_NAMES:
            assert check_draft(folder, engine=engine).verdict != "LOADS"


OTHERS: tuple[tuple[str, str, str], ...] = (
    ("DFlash3DraftModel", "x", "DFlash with layers of another kind"),
    ("UnheardForCausalLM", "markov_head.markov_w1.weight", "DSpark"),
    ("UnheardForCausalLM", "model.layers.61.eh_proj.weight", "an MTP layer"),
    ("UnheardForCausalLM", "x", "of architecture 'UnheardForCausalLM'"),
    (LLAMA, "candidate_selector.prev_embedding.weight", "DFlash2"),
    (EAGLE3, "midlayer.self_attn.kv_b_proj.weight", "eagle3-llama with latent attention (MLA)"),
    (EAGLE3, "enorm.weight", "EAGLE-3 with TensorRT-LLM's eh_proj"),
)


def test_what_no_family_reads_is_told_what_it_is(tmp_path: Path) -> None:
    folder = tiny_eagle3_llama(tmp_path / "draft")
    for architecture, tensor, kind in OTHERS:
        edit_json(folder / "config.json", architectures=[architecture])
        write_tensors(folder, {tensor: bf16((1,))})
        without_maths(folder, f"no maths of this draft ({kind})")
    edit_json(folder / "config.json", architectures=["UnheardForCausalLM"])
    write_tensors(folder, {"model.layers.3.mlp.up_proj.weight": bf16((1,))})
    refused(folder, "it is a whole language model")
    layers = {f"model.layers.{i}.eh_proj.weight": bf16((1,)) for i in (3,)}
    write_tensors(folder, {"model.layers.0.mlp.up_proj.weight": bf16((1,)), **layers})
    refused(folder, "it is an MTP layer")
