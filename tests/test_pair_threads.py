"""What people who asked in public threads should have been told: a draft and a target as theirs.

Only the configs matter, and the names and dtypes of tensors; the folders are tiny.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from asked_pairs import check_pair
from draftquant import api as dq
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.pairing.inherited import rotated_by
from draftquant.recipes.errors import DraftQuantWarning
from tiny import config_of, edit_json, store, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import tiny_language_model
from tiny_mtp import tiny_glm4_moe_mtp, tiny_mimo_mtp

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "torch_dtype": "bfloat16",
}  # fmt: skip
FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
FP8_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8,
        "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
        "symmetric": True, "dynamic": True}}},
}  # fmt: skip
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4,
        "type": "float", "group_size": 16, "dynamic": False}, "input_activations": {"num_bits": 4,
        "type": "float", "group_size": 16, "dynamic": False}}},
    "ignore": ["lm_head"],
}  # fmt: skip
NVFP4_HEAD = ("weight", "weight_scale", "weight_scale_2", "input_scale")
Fixture = Callable[[Path], Path]


def target(folder: Path, head: tuple[str, ...] = ("weight",), **changes: Any) -> Path:
    """A target of which only embedding and head are stored, the head in these parts."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}), encoding="utf-8")
    table = store(np.zeros((96, 64), np.float32), "BF16")
    parts = {f"lm_head.{part}": table for part in head}
    write_tensors(folder, {"model.embed_tokens.weight": table, **parts}, metadata={})
    return folder


def eagle3(folder: Path, **keys: Any) -> Path:
    return tiny_eagle3_llama(folder, config={"torch_dtype": "bfloat16", **keys})


class Thread(NamedTuple):
    """One thread: the draft, how the target differs, its flags, and what is said of it.

    Attributes:
        head: parts of which the target's head is stored.
        level, words: of a finding of `engine`. line: what its launch line has.
    """

    draft: Fixture
    engine: EngineName
    level: str
    words: str
    args: str = ""
    changes: Mapping[str, Any] = {}
    head: tuple[str, ...] = ("weight",)
    line: str = ""


UNQUANT = "--speculative-draft-model-quantization unquant"
AWQ_TARGET = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
THREADS: dict[str, Thread] = {
    "sglang#28196": Thread(
        eagle3, "sglang", "warning", "gives the draft the target's --quantization awq",
        "--quantization awq", AWQ_TARGET, line=UNQUANT,
    ),
    "sglang#22588": Thread(
        lambda folder: eagle3(folder, quantization_config=FP8_BLOCKS), "sglang", "warning",
        "gives the draft the target's --quantization modelopt_fp4",
        "--quantization modelopt_fp4", line=UNQUANT,
    ),
    "sglang#35534": Thread(
        lambda folder: tiny_dflash(folder, kind="dflash2"), "sglang", "note",
        "requires a dense FP16/BF16/FP32 target lm_head", head=NVFP4_HEAD,
    ),
    "a shared head that is quantized": Thread(
        lambda folder: tiny_eagle3_llama(folder, head=False), "sglang", "refused",
        "puts its packed values into a head", head=NVFP4_HEAD,
    ),
    "vllm#50170": Thread(
        lambda folder: eagle3(folder, eagle_config={}), "vllm", "note",
        "names no layers of the target: engines hand it the outputs of layers [1, 3, 4]",
    ),
    "vllm#48894": Thread(
        lambda folder: eagle3(folder, max_position_embeddings=2048), "sglang", "warning",
        "made for 2,048 positions and 131,072 are served",
        changes={"max_position_embeddings": 131072},
        line="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python",
    ),
    "tokenspeed#1012": Thread(
        tiny_dspark, "vllm", "warning", "stores no scales, so engines take 1",
        "--kv-cache-dtype fp8", line='"kv_cache_dtype": "bfloat16"',
    ),
    "vllm#48787": Thread(
        tiny_dspark, "vllm", "warning", "(its quantization_config), and the draft's becomes",
        changes={"quantization_config": {**NVFP4, "kv_cache_quant_algo": "FP8"}},
        line='"kv_cache_dtype": "bfloat16"',
    ),
    "dflash-mlx#60": Thread(
        tiny_dflash, "vllm", "warning", "casts its bfloat16 weights", "--dtype float16",
    ),
    "mlc-llm#3022": Thread(
        tiny_language_model, "vllm", "refused", "should have the same vocabulary size",
        changes={"vocab_size": 128},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADS)
def test_what_a_thread_should_have_been_told(name: str, tmp_path: Path) -> None:
    thread = THREADS[name]
    beside = target(tmp_path / "target", thread.head, **thread.changes)
    pair = check_pair(
        thread.draft(tmp_path / "draft"), beside, engine=thread.engine, target_args=thread.args
    )
    said = [f.text for f in pair.findings if f.level == thread.level]
    assert any(thread.words in text for text in said), pair.findings
    assert thread.line in (pair.of(thread.engine).launch or "")


def beside_layer(folder: Path, layer: Path, declared: Mapping[str, Any]) -> Path:
    """A target with the config of an MTP layer's folder, which declares a quantization."""
    folder.mkdir()
    config = config_of(layer)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    return folder


def test_a_layer_in_bf16_under_a_target_that_declares_it_quantized(tmp_path: Path) -> None:
    """vllm#37667, vllm#43304, Model-Optimizer#750: the exclude list does not name the layer."""
    layer = tiny_glm4_moe_mtp(tmp_path / "layer")
    beside = beside_layer(tmp_path / "target", layer, FP8_CHANNELS)
    pair = check_pair(layer, beside, engine="vllm")
    said = [f.text for f in pair.findings if (f.level, f.subject) == ("unknown", "mtp")]
    assert "as the target's quantization_config says" in said[0]
    assert pair.verdict == "UNKNOWN"
    edit_json(beside / "config.json", quantization_config=None)
    assert check_pair(layer, beside, engine="vllm").verdict == "LOADS"


def test_a_target_whose_quantizer_dropped_the_layer(tmp_path: Path) -> None:
    """llm-compressor#2735, #3118, vllm#44087, Model-Optimizer#2312: promised, and not stored."""
    beside = target(tmp_path / "target", num_nextn_predict_layers=1)
    pair = check_pair(eagle3(tmp_path / "draft"), beside)
    dropped = next(f for f in pair.findings if f.subject == "mtp")
    assert "promises MTP layers (1), and its shards have none" in dropped.text
    assert "draftquant graft" in dropped.remedy
    next(beside.glob("*.safetensors")).unlink()
    unknown = check_pair(tmp_path / "draft", beside)
    assert "dropped" not in " ".join(finding.text for finding in unknown.findings)
    whole = tiny_mimo_mtp(tmp_path / "whole", inside_target=True)
    inside = check_pair(whole, whole, subtree="model.mtp_layers.0")
    assert not [f for f in inside.findings if f.subject == "mtp"]
    assert '"model"' not in (inside.of("vllm").launch or "")
    assert '"method": "mtp"' in (inside.of("vllm").launch or "")
    assert "--speculative-draft-model-path" not in (inside.of("sglang").launch or "")


@pytest.mark.parametrize(
    ("changes", "args", "level"),
    [
        ({"num_mtp_layers": 1}, "--model-impl transformers", "unknown"),
        ({"text_config": {"num_mtp_layers": 1}}, "--model-impl=transformers", "unknown"),
        ({"num_mtp_layers": 1}, None, None),
        ({}, "--model-impl transformers", None),
    ],
)
def test_mtp_layers_of_transformers_own_class_were_not_read(
    changes: dict[str, Any], args: str | None, level: str | None, tmp_path: Path
) -> None:
    """New in vLLM 0.33: `config/speculative.py:1380`."""
    layer = tiny_glm4_moe_mtp(tmp_path / "layer")
    config = config_of(layer)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({**config, **changes}))
    pair = check_pair(layer, tmp_path / "target", engine="vllm", target_args=args)
    found = [f.level for f in pair.findings if "transformers" in f.text and f.subject == "mtp"]
    assert found == ([] if level is None else [level])


def transform(targets: list[str], location: str) -> dict[str, Any]:
    applied = [{"targets": targets, "location": location}]
    return {"transform_config": {"config_groups": {"R1": {"apply": applied}}}}


ROTATED = [
    (transform(["re:.*embed_tokens$", "re:.*o_proj$"], "weight_output"), True),
    (transform(["model.embed_tokens"], "weight_input"), False),
    (transform(["Linear"], "weight_output"), False),  # QuIP, whose inverse is at the output
    ({"algo_config": [{"name": "gptq"}, {"name": "rotation", "r1": True}]}, True),
    ({"algo_config": [{"name": "rotation", "r1": True, "online_r1_rotation": True}]}, False),
    ({"algo_config": [{"name": "rotation", "r1": False, "r2": True}]}, False),
    ({"algo_config": {"name": "quarot"}}, True),
    ({"transform_config": {"config_groups": {"R1": {"apply": [None, 3]}}}}, False),
    (None, False),
]


def test_a_target_whose_residual_stream_is_rotated(tmp_path: Path) -> None:
    for declared, is_said in ROTATED:
        assert (rotated_by(declared) is not None) == is_said
    rotated = transform(["re:.*embed_tokens$"], "weight_output")
    declared = {"quant_method": "compressed-tensors", "format": "dense", **rotated}
    draft, beside = PAIR / "draft", shutil.copytree(PAIR / "target", tmp_path / "target")
    edit_json(beside / "config.json", quantization_config=declared)
    pair = check_pair(draft, beside)
    assert (pair.verdict, pair.exit_code) == ("LOADS BUT WRONG", 1)
    (found,) = [each for each in pair.findings if each.level == "wrong"]
    assert "transform R1 of its transform_config" in found.text
    assert "the target that it was trained on" in found.remedy
    with pytest.warns(DraftQuantWarning, match="residual stream is rotated"):
        dq.record(
            beside, PAIR / "prompts.jsonl", draft=draft, engine="vllm", print_server_args=True,
            shared=tmp_path / "shared",
        )  # fmt: skip
