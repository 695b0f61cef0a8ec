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
from draftquant.quantize.pairing.pair import PairCheck
from draftquant.recipes.errors import DraftQuantWarning
from tiny import config_of, edit_json, store, tiny_eagle3_llama, write_tensors
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from tiny_llama import tiny_language_model
from tiny_mtp import tiny_glm4_moe_mtp, tiny_mimo_mtp

TOLD = ("said",)
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
    """One thread: the draft, the engine's flags, how the target differs, parts of its head.

    What is said of it, and its launch line, are kept in told/pair_threads.txt.
    """

    draft: Fixture
    engine: EngineName
    args: str = ""
    changes: Mapping[str, Any] = {}
    head: tuple[str, ...] = ("weight",)


AWQ_TARGET = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
NVFP4_CACHE = {"quantization_config": {**NVFP4, "kv_cache_quant_algo": "FP8"}}
THREADS: dict[str, Thread] = {
    "sglang#28196": Thread(eagle3, "sglang", "--quantization awq", AWQ_TARGET),
    "sglang#22588": Thread(
        lambda folder: eagle3(folder, quantization_config=FP8_BLOCKS), "sglang",
        "--quantization modelopt_fp4",
    ),
    "sglang#35534": Thread(
        lambda folder: tiny_dflash(folder, kind="dflash2"), "sglang", head=NVFP4_HEAD),
    "a shared head that is quantized": Thread(
        lambda folder: tiny_eagle3_llama(folder, head=False), "sglang", head=NVFP4_HEAD),
    "vllm#50170": Thread(lambda folder: eagle3(folder, eagle_config={}), "vllm"),
    "vllm#48894": Thread(
        lambda folder: eagle3(folder, max_position_embeddings=2048), "sglang",
        changes={"max_position_embeddings": 131072},
    ),
    "tokenspeed#1012": Thread(tiny_dspark, "vllm", "--kv-cache-dtype fp8"),
    "vllm#48787": Thread(tiny_dspark, "vllm", changes=NVFP4_CACHE),
    "dflash-mlx#60": Thread(tiny_dflash, "vllm", "--dtype float16"),
    "mlc-llm#3022": Thread(tiny_language_model, "vllm", changes={"vocab_size": 128}),
}  # fmt: skip


def said(pair: PairCheck) -> str:
    """What was found, and the launch lines."""
    found = [f"{f.engine} {f.level} {f.subject}: {f.text}; {f.remedy}" for f in pair.findings]
    return "\n".join([*found, *(str(each.launch) for each in pair.engines)])


@pytest.mark.parametrize("name", THREADS)
def test_what_a_thread_should_have_been_told(name: str, tmp_path: Path) -> None:
    thread = THREADS[name]
    beside = target(tmp_path / "target", thread.head, **thread.changes)
    draft = thread.draft(tmp_path / "draft")
    said(check_pair(draft, beside, engine=thread.engine, target_args=thread.args))


def beside_layer(folder: Path, layer: Path, **changes: Any) -> Path:
    """A target with the config of an MTP layer's folder, and other keys."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config_of(layer), **changes}))
    return folder


def test_a_layer_in_bf16_under_a_target_that_declares_it_quantized(tmp_path: Path) -> None:
    """vllm#37667, vllm#43304, Model-Optimizer#750: the exclude list does not name the layer."""
    layer = tiny_glm4_moe_mtp(tmp_path / "layer")
    beside = beside_layer(tmp_path / "target", layer, quantization_config=FP8_CHANNELS)
    said(check_pair(layer, beside, engine="vllm"))
    edit_json(beside / "config.json", quantization_config=None)
    assert check_pair(layer, beside, engine="vllm").verdict == "LOADS"


def test_a_target_whose_quantizer_dropped_the_layer(tmp_path: Path) -> None:
    """llm-compressor#2735, #3118, vllm#44087, Model-Optimizer#2312: promised, and not stored."""
    beside = target(tmp_path / "target", num_nextn_predict_layers=1)
    said(check_pair(eagle3(tmp_path / "draft"), beside))
    next(beside.glob("*.safetensors")).unlink()
    said(check_pair(tmp_path / "draft", beside))
    whole = tiny_mimo_mtp(tmp_path / "whole", inside_target=True)
    said(check_pair(whole, whole, subtree="model.mtp_layers.0"))


def test_mtp_layers_of_transformers_own_class_were_not_read(tmp_path: Path) -> None:
    """New in vLLM 0.33: `config/speculative.py:1380`."""
    layer = tiny_glm4_moe_mtp(tmp_path / "layer")
    own, transformers = {"num_mtp_layers": 1}, "--model-impl transformers"
    for number, (changes, args) in enumerate((
        (own, transformers), ({"text_config": own}, "--model-impl=transformers"),
        (own, None), ({}, transformers),
    )):  # fmt: skip
        beside = beside_layer(tmp_path / f"{number}", layer, **changes)
        said(check_pair(layer, beside, engine="vllm", target_args=args))


def transform(targets: list[str], location: str) -> dict[str, Any]:
    applied = [{"targets": targets, "location": location}]
    return {"transform_config": {"config_groups": {"R1": {"apply": applied}}}}


def test_a_target_whose_residual_stream_is_rotated(tmp_path: Path) -> None:
    for declared, is_said in [
        (transform(["re:.*embed_tokens$", "re:.*o_proj$"], "weight_output"), True),
        (transform(["model.embed_tokens"], "weight_input"), False),
        (transform(["Linear"], "weight_output"), False),  # QuIP, whose inverse is at the output
        ({"algo_config": [{"name": "gptq"}, {"name": "rotation", "r1": True}]}, True),
        ({"algo_config": [{"name": "rotation", "r1": True, "online_r1_rotation": True}]}, False),
        ({"algo_config": [{"name": "rotation", "r1": False, "r2": True}]}, False),
        ({"algo_config": {"name": "quarot"}}, True),
        ({"transform_config": {"config_groups": {"R1": {"apply": [None, 3]}}}}, False),
        (None, False),
    ]:
        assert (rotated_by(declared) is not None) == is_said
    rotated = transform(["re:.*embed_tokens$"], "weight_output")
    declared = {"quant_method": "compressed-tensors", "format": "dense", **rotated}
    draft, beside = PAIR / "draft", shutil.copytree(PAIR / "target", tmp_path / "target")
    edit_json(beside / "config.json", quantization_config=declared)
    pair = check_pair(draft, beside)
    assert (pair.verdict, pair.exit_code) == ("LOADS BUT WRONG", 1)
    said(pair)
    with pytest.warns(DraftQuantWarning, match="residual stream is rotated"):
        dq.record(
            beside, PAIR / "prompts.jsonl", draft=draft, engine="vllm", print_server_args=True,
            shared=tmp_path / "shared",
        )  # fmt: skip
