"""MTP layers of Qwen3-Next and Qwen3.5: what other layers do not have.

Their maths against transformers' own layers, and the way through the commands: `test_mtp.py`.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.geometry import GroupedAttention
from draftquant.quantize.drafts.rope import RopeConfig
from draftquant.quantize.drafts.shared.layers import LlamaAttention
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.quantize.stored.stored_tables import EMBEDDING, HEAD
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, write_tensors
from tiny_mtp import tiny_qwen3_next_mtp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("experts", [0, 4])
def test_subtree_is_the_layer_alone(experts: int, tmp_path: Path) -> None:
    target = tiny_qwen3_next_mtp(tmp_path / "target", experts=experts, inside_target=True)
    out = tmp_path / "out"
    quantize = ["quantize", str(target), "--subtree", "mtp", "--recipe", "fp8-ptpc"]
    assert main([*quantize, "--out", str(out)]) == 0
    assert main(["verify", str(out), "--against", str(target), "--subtree", "mtp"]) == 0
    stored = read_tensors(out)
    assert all(name.startswith("mtp.") for name in stored)
    assert "mtp.layers.0.self_attn.q_proj.weight_scale" in stored
    kept = {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"}
    if experts:
        kept |= {"mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.shared_expert_gate.weight"}
    before = read_tensors(target)
    assert {name: stored[name] for name in kept} == {name: before[name] for name in kept}


class Identity:
    """Linears that give their input twice, or as it is."""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), dim=-1) if name.endswith("q_proj") else x

    def on_cache(self, _layer: int, keys: Any, values: Any) -> Any:
        return keys, values


def test_gate_stands_behind_each_heads_query() -> None:
    rope = RopeConfig(theta=10000.0, yarn=None)
    own = GroupedAttention(num_key_value_heads=1, head_dim=2, rotary_dim=2, gate="elements")
    attention = LlamaAttention(SimpleNamespace(attention=own, rope=rope))
    x = torch.tensor([[[1.0, 3.0, -2.0, -2.0]]])  # q_proj gives two heads' query 1 3, gate -2 -2
    found = attention.project(0, x, torch.tensor([0]), Identity())
    assert found.q.tolist() == [[[[1.0, 3.0]], [[1.0, 3.0]]]]
    assert found.v.transpose(1, 2).flatten(2).tolist() == x.tolist()
    torch.testing.assert_close(found.gate, torch.full((1, 1, 4), 1 / (1 + math.e**2)))


@pytest.mark.parametrize(
    ("experts", "changes", "said"),
    [
        (0, {"attn_output_gate": False}, "attn_output_gate: expected True, got False"),
        (0, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: expected 1"),
        (0, {"attention_bias": True}, "attention_bias: expected False"),
        (0, {"hidden_size": None}, "text_config: hidden_size: missing key"),
        (4, {"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most num_experts, 4"),
        (4, {"shared_expert_intermediate_size": 32}, "disagrees with the width of the shared"),
        (4, {"mlp_only_layers": [0]}, "mlp.experts.0.down_proj.weight: no tensor of qwen3-next"),
    ],
)
def test_bad_configs(experts: int, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = tiny_qwen3_next_mtp(tmp_path / "draft", experts=experts, config=changes)
    with pytest.raises(CheckpointError, match=said):
        read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_qwen3_next_without_experts_is_refused_by_engines(
    engine: EngineName, tmp_path: Path
) -> None:
    """Executed; with experts that the MTP layer does not use, in vLLM alone."""
    dense = tiny_qwen3_next_mtp(tmp_path / "dense", experts=0, tables=False)
    mixed = tiny_qwen3_next_mtp(tmp_path / "mixed", config={"num_experts": 0})
    (dense / "config.json").write_text(
        (mixed / "config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    said = check_draft(dense, engine=engine)
    assert said.verdict == "REFUSED"
    wanted = {"vllm": "No Qwen3Next layer found", "sglang": "than the number of experts 0."}
    assert wanted[engine] in (said.error or "")
    edit_json(dense / "config.json", num_experts=4, mlp_only_layers=[0])
    assert check_draft(dense, engine="vllm").verdict == "REFUSED"
    assert check_draft(dense, engine="sglang").verdict == "UNKNOWN"


def stacked_like(folder: Path, tensors: dict[str, Stored]) -> None:
    """The folder with its experts in two tensors, as Qwen3.5's MoE layers are released."""
    own = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefix, count = "mtp.layers.0.mlp.experts.", 4

    def stack(*leaves: str) -> Stored:
        parts = [tensors[f"{prefix}{i}.{leaf}.weight"] for i in range(count) for leaf in leaves]
        rows, columns = parts[0].shape
        shape = (count, len(leaves) * rows, columns)
        return Stored(parts[0].dtype, shape, b"".join(part.data for part in parts))

    own[f"{prefix}gate_up_proj"] = stack("gate_proj", "up_proj")
    own[f"{prefix}down_proj"] = stack("down_proj")
    write_tensors(folder, own, metadata={"format": "pt"})


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    apart = tiny_qwen3_next_mtp(tmp_path / "apart")
    stacked = tiny_qwen3_next_mtp(tmp_path / "stacked")
    stacked_like(stacked, read_tensors(apart))
    assert read_tensors(stacked).keys() != read_tensors(apart).keys()
    for folder in (apart, stacked):
        out = tmp_path / f"{folder.name}-out"
        assert main(["quantize", str(folder), "--recipe", "int4-channel", "--out", str(out)]) == 0
        assert main(["verify", str(out), "--against", str(folder)]) == 0
    assert read_tensors(tmp_path / "stacked-out") == read_tensors(tmp_path / "apart-out")
    ours, theirs = load_draft(stacked), load_draft(apart)
    assert ours.weights.keys() == theirs.weights.keys()
    assert all(torch.equal(ours.weights[name], w) for name, w in theirs.weights.items())


def test_a_changed_slice_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verify reads the stacked source: another expert's bytes are another source."""
    source = tiny_qwen3_next_mtp(tmp_path / "source")
    stacked_like(source, read_tensors(source))
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--recipe", "int4-channel", "--out", str(out)]) == 0
    tensors = read_tensors(source)
    stack = tensors["mtp.layers.0.mlp.experts.down_proj"]
    third = len(stack.data) // 4 * 2
    changed = stack.data[:third] + bytes(128) + stack.data[third + 128 :]
    tensors["mtp.layers.0.mlp.experts.down_proj"] = Stored(stack.dtype, stack.shape, changed)
    write_tensors(source, tensors, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(source)]) == 1
    assert "mlp.experts.2.down_proj" in capsys.readouterr().out


def in_speculators_layout(folder: Path, **changes: Any) -> Path:
    """The folder as speculators' converter saves it, experts stacked."""
    tensors = read_tensors(folder)
    if any(".experts." in name for name in tensors):
        stacked_like(folder, tensors)
    renamed = {
        name.replace("mtp.fc.", "mtp_layers.0.input_proj.")
        .replace("mtp.norm.", "mtp_layers.0.final_layernorm.")
        .replace("mtp.pre_fc_norm_hidden.", "mtp_layers.0.hidden_layernorm.")
        .replace("mtp.pre_fc_norm_embedding.", "mtp_layers.0.token_layernorm.")
        .replace("mtp.layers.0.", "mtp_layers.0."): tensor
        for name, tensor in read_tensors(folder).items()
        if name.startswith("mtp.")
    }
    write_tensors(folder, renamed, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = config.get("text_config", config)
    keys = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "speculators_config": {"algorithm": "mtp"},
        "transformer_layer_config": {
            k: v for k, v in layers.items() if k not in ("architectures", "torch_dtype")
        },
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return folder


@pytest.mark.parametrize("experts", [0, 4])
def test_speculators_layout_of_the_same_layer(experts: int, tmp_path: Path) -> None:
    plain = tiny_qwen3_next_mtp(tmp_path / "plain", experts=experts)
    same = tiny_qwen3_next_mtp(tmp_path / "same", experts=experts, tables=False)
    in_speculators_layout(same)
    ours = {row.canonical: row.tensor.shape for row in read_draft(Checkpoint.open(same)).rows}
    theirs = {row.canonical: row.tensor.shape for row in read_draft(Checkpoint.open(plain)).rows}
    assert ours == {n: s for n, s in theirs.items() if n not in (EMBEDDING, HEAD)}
    geometry = read_draft(Checkpoint.open(same)).geometry
    assert geometry == read_draft(Checkpoint.open(plain)).geometry
    out = tmp_path / "out"
    assert main(["quantize", str(same), "--recipe", "fp8-ptpc", "--out", str(out)]) == 0
    assert main(["verify", str(out), "--against", str(same)]) == 0
    answer = check_draft(same, engine="vllm")
    assert answer.verdict == "REFUSED"
    assert "Expected one of" in (answer.error or "")
