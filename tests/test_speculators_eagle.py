"""EAGLE-1 in the layout of speculators 0.1 to 0.3: read as the heads that it was converted from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines import check_draft
from draftquant.quantize.errors import CheckpointError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.quantize_draft import quantize_draft
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from tiny import edit_json, read_tensors, write_tensors
from tiny_llama import tiny_eagle1
from tiny_speculators import tiny_speculators_eagle

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = {"lm_head.weight": torch.eye(96, 64), "embed_tokens.weight": torch.eye(96, 64)}


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_head_that_it_was_converted_from(bias: bool, tmp_path: Path) -> None:
    ours = load_draft(
        tiny_speculators_eagle(tmp_path / "draft", fusion_bias=bias, dtype="F32"), shared=SHARED
    )
    plain = load_draft(
        tiny_eagle1(tmp_path / "plain", embed=False, fc_bias=bias, dtype="F32"), shared=SHARED
    )
    assert ours.family.name == plain.family.name == "eagle1-llama"
    assert ours.weights.keys() == plain.weights.keys()
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)
    for field in ("rope", "rms_norm_eps", "num_layers", "num_key_value_heads", "head_dim"):
        assert getattr(ours.geometry, field) == getattr(plain.geometry, field)


def test_keys_that_are_not_written_are_those_of_a_llama_config(tmp_path: Path) -> None:
    """`to_diff_dict`: what is as transformers has it is left out. Layers were the target's."""
    folder = tiny_speculators_eagle(tmp_path / "draft", layers={"num_hidden_layers": 32})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("rope_theta", "rms_norm_eps"):
        del config["transformer_layer_config"][key]
    config["architectures"] = ["EagleSpeculator"]
    config["transformer_layer_architecture"] = "auto"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    geometry: Any = read_draft(Checkpoint.open(folder)).geometry
    assert (geometry.num_layers, geometry.rope.theta, geometry.rms_norm_eps) == (1, 10000.0, 1e-6)
    del config["transformer_layer_config"]["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected shape \[4096, 8192\]"):
        read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layernorms": True}, "layernorms: expected False, got True: a norm of the embedding"),
        (
            {"transformer_layer_architecture": "MistralDecoderLayer"},
            "transformer_layer_architecture: expected 'LlamaDecoderLayer', got 'Mistral",
        ),
        ({"fusion_bias": True}, "of eagle1-llama are missing: fc.bias"),
        ({"fusion_bias": 1}, "fusion_bias: expected true or false, got 1"),
        ({"architectures": ["EagleSpeculator", "Other"]}, r"architectures: expected \['EagleSpec"),
        ({"architectures": ["Eagle3Speculator"]}, r"architectures: expected \['EagleSpeculator'\]"),
        ({"architectures": []}, r"architectures: expected \['EagleSpeculator'\], got \[\]"),
        ({"transformer_layer_config": None}, "transformer_layer_config: missing key"),
    ],
)
def test_bad_configs(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = tiny_speculators_eagle(tmp_path / "draft")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=what):
        read_draft(Checkpoint.open(folder))


def test_layers_of_another_model(tmp_path: Path) -> None:
    folder = tiny_speculators_eagle(tmp_path / "draft", layers={"model_type": "mistral"})
    with pytest.raises(CheckpointError, match="model_type: expected 'llama', got 'mistral'"):
        read_draft(Checkpoint.open(folder))


def test_a_bias_that_the_config_denies(tmp_path: Path) -> None:
    folder = tiny_speculators_eagle(tmp_path / "draft", fusion_bias=True)
    edit_json(folder / "config.json", fusion_bias=False)
    with pytest.raises(CheckpointError, match=r"fusion_fc.bias: no tensor of eagle1-llama"):
        read_draft(Checkpoint.open(folder))


def test_norms_beside_the_layers_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_speculators_eagle(tmp_path / "draft")
    tensors = read_tensors(folder)
    norm = tensors["transformer.post_attention_layernorm.weight"]
    write_tensors(folder, {**tensors, "pre_lm_head_layernorm.weight": norm})
    with pytest.raises(CheckpointError, match="the mark of EAGLE-1 with speculators' layernorms"):
        read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize("name", ["fp8-ptpc", "int4-channel"])
def test_it_is_quantized_and_keeps_its_layout(name: str, tmp_path: Path) -> None:
    folder = tiny_speculators_eagle(tmp_path / "draft", fusion_bias=True)
    plan = make_plan(load_recipe(name), read_draft(Checkpoint.open(folder)))
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    assert verify(tmp_path / "out", folder).ok
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == "eagle"
    assert len(load_draft(tmp_path / "out", shared=SHARED).quantized) == 7


def test_no_engine_reads_the_layout(tmp_path: Path) -> None:
    """Executed with the loaders of vLLM 0.33.0 and SGLang 0.5.23."""
    folder = tiny_speculators_eagle(tmp_path / "draft")
    vllm, sglang = (check_draft(folder, engine=e) for e in ("vllm", "sglang"))  # type: ignore[arg-type]
    assert (vllm.verdict, sglang.verdict) == ("REFUSED", "REFUSED")
    assert "Expected one of: " in (vllm.error or "")
    assert "ordinary EAGLE-1 head" in (vllm.remedy or "")
    assert "Should have a `model_type` key" in (sglang.error or "")
