"""EAGLE-1 heads: names, refusals, and their forward against the trainer's own module."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines import check_draft
from draftquant.quantize.errors import CheckpointError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.lints import find_lints
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.quantize_draft import quantize_draft
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from tiny import edit_json, read_tensors, write_tensors
from tiny_llama import tiny_eagle1

sys.path.append(str(Path(__file__).parent / "engines"))  # its modules stand alone

import eagle1 as trainer

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED: dict[str, Any] = json.loads(trainer.OUT.read_text(encoding="utf-8"))
SHARED = {"lm_head.weight": torch.eye(96, 64), "embed_tokens.weight": torch.ones(96, 64)}


def family_of(folder: Path) -> str:
    return read_draft(Checkpoint.open(folder)).family.name


def hidden_states(draft: LoadedDraft) -> list[list[float]]:
    """Behind each step of the chain that `trainer.hidden_states` runs."""
    tokens, features = trainer.text()
    last = trainer.NUM_TOKENS - trainer.DEPTHS - 1
    passes = draft.forward.passes(
        draft.forward.fuse(features[None, : last + 1]),
        torch.tensor([tokens]),
        rows=range(last, last + 1),
        num_draft_tokens=trainer.DEPTHS,
    )
    return [one.hidden[0, 0, 0, : trainer.SHOWN].tolist() for one in passes]


# ---- names


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({}, {}),
        ({"fc_bias": True, "head": True, "num_layers": 2}, {}),
        ({"embed": False}, {"architectures": ["EagleLlamaForCausalLM"]}),
        ({"outer": "model."}, {"architectures": ["LlamaForCausalLMEagle"]}),
        ({"kind": "Qwen2"}, {}),
        ({"kind": "Qwen2"}, {"architectures": ["Qwen2ForCausalLMEagle"]}),
    ],
)
def test_an_eagle1_head_is_known_by_its_tensors(
    arguments: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_eagle1(tmp_path / "draft", **arguments)
    edit_json(folder / "config.json", **changes)
    assert family_of(folder) == "eagle1-llama"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layers.0.input_layernorm.weight", "EAGLE-1 with a norm before its first layer"),
        ("embedding_layernorm.weight", "EAGLE-1 with speculators' layernorms"),
        ("enorm.weight", "EAGLE-1 of DeepSeek"),
        ("input_norm1.weight", "EAGLE-1 of MiniCPM"),
    ],
)
def test_a_head_of_another_kind_is_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft")
    tensors = read_tensors(folder)
    norm = tensors["layers.0.post_attention_layernorm.weight"]
    write_tensors(folder, {**tensors, name: norm})
    with pytest.raises(CheckpointError, match=f"is the mark of {what}"):
        read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("hidden_act", "gelu", "hidden_act: expected 'silu', got 'gelu': another activation"),
        ("mlp_bias", True, "mlp_bias: expected False, got True: biases of the MLP"),
        ("layernorms", True, "layernorms: expected false, got true"),
        ("hot_vocab_size", 48, "hot_vocab_size: expected None, got 48: a part of the vocabulary"),
    ],
)
def test_a_config_that_nothing_computes_is_refused(
    key: str, value: object, what: str, tmp_path: Path
) -> None:
    folder = tiny_eagle1(tmp_path / "draft", config={key: value})
    with pytest.raises(CheckpointError, match=what):
        read_draft(Checkpoint.open(folder))


def test_tensors_of_eagle1_and_eagle3_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft", config={"architectures": ["LlamaForCausalLMEagle3"]})
    with pytest.raises(CheckpointError, match="eagle3-llama, but the tensors are those of eagle1"):
        read_draft(Checkpoint.open(folder))


# ---- forward


@pytest.mark.parametrize("case", RECORDED)
def test_each_step_is_that_of_the_trainers_module(case: str, tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft", dtype="F32", **trainer.CASES[case])
    ours = hidden_states(load_draft(folder, shared=SHARED))
    assert torch.tensor(ours) == pytest.approx(torch.tensor(RECORDED[case]), abs=2e-5)


def test_a_bias_of_fc_is_missed(tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft", dtype="F32", **trainer.CASES["one layer"])
    tensors = read_tensors(folder)
    del tensors["fc.bias"]
    write_tensors(folder, tensors)
    ours = hidden_states(load_draft(folder, shared=SHARED))
    assert torch.tensor(ours) != pytest.approx(torch.tensor(RECORDED["one layer"]), abs=0.1)


def test_the_head_reads_what_the_layers_give_out(tmp_path: Path) -> None:
    draft = load_draft(tiny_eagle1(tmp_path / "draft"), shared=SHARED)
    hidden = torch.linspace(-1, 1, 64)
    assert torch.equal(draft.forward.logits(hidden)[:64], hidden)


# ---- commands


@pytest.mark.parametrize("name", ["fp8-ptpc", "int4-channel"])
def test_it_is_quantized_and_verified(name: str, tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft", kind="Qwen2", fc_bias=True)
    plan = make_plan(load_recipe(name), read_draft(Checkpoint.open(folder)))
    assert len(plan.quantized) == 7
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    assert not verify(tmp_path / "out", folder).faults
    draft = load_draft(tmp_path / "out", shared=SHARED)
    assert torch.isfinite(torch.tensor(hidden_states(draft))).all()


def test_fc_is_quantized_by_choice(tmp_path: Path) -> None:
    recipe = load_recipe("int4-channel")
    rules = tuple(
        replace(rule, action="quantize", why=None) if rule.role == ("fusion",) else rule
        for rule in recipe.rules
    )
    folder = tiny_eagle1(tmp_path / "draft")
    plan = make_plan(replace(recipe, rules=rules), read_draft(Checkpoint.open(folder)))
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    assert "fc" in load_draft(tmp_path / "out", shared=SHARED).quantized


@pytest.mark.parametrize(
    ("arguments", "changes", "vllm", "sglang"),
    [
        ({}, {}, "LOADS", "LOADS BUT WRONG"),
        ({"fc_bias": True}, {}, "LOADS BUT WRONG", "LOADS BUT WRONG"),
        (
            {"fc_bias": True},
            {"architectures": ["LlamaForCausalLMEagle"]},
            "REFUSED",
            "LOADS",
        ),
        ({"kind": "Qwen2"}, {}, "REFUSED", "LOADS BUT WRONG"),
        ({"head": True}, {}, "REFUSED", "LOADS BUT WRONG"),
        ({}, {"bias": True}, "LOADS BUT WRONG", "LOADS BUT WRONG"),
        ({"outer": "model."}, {}, "REFUSED", "LOADS BUT WRONG"),
    ],
)
def test_check_says_what_the_engines_did(
    arguments: dict[str, Any], changes: dict[str, Any], vllm: str, sglang: str, tmp_path: Path
) -> None:
    """Each of these folders was loaded by the engines' own loaders."""
    folder = tiny_eagle1(tmp_path / "draft", **arguments)
    edit_json(folder / "config.json", **changes)
    assert check_draft(folder, engine="vllm").verdict == vllm
    assert check_draft(folder, engine="sglang").verdict == sglang


def test_its_servers_are_told_the_method(tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft")
    assert '"method": "eagle"' in (check_draft(folder, engine="vllm").launch or "")
    assert "algorithm EAGLE " in (check_draft(folder, engine="sglang").launch or "")


def test_no_lint_takes_it_for_eagle3(tmp_path: Path) -> None:
    lints = find_lints(read_draft(Checkpoint.open(tiny_eagle1(tmp_path / "draft"))))
    assert {lint.name for lint in lints} == {"embed-tokens"}
