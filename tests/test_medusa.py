"""Medusa heads: names, refusals, and their forward against vLLM 0.32's own module."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines import check_draft
from draftquant.quantize.errors import CheckpointError, EstimateError, PlanError
from draftquant.quantize.estimate.draft_round import (
    checked_num_draft_tokens,
    draft_round,
    plain_weights,
)
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints import find_lints
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import load_recipe
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, write_tensors
from tiny_llama import tiny_eagle1
from tiny_medusa import tiny_medusa

sys.path.append(str(Path(__file__).parent / "engines"))  # its modules stand alone

import medusa as served

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED: dict[str, Any] = json.loads(served.OUT.read_text(encoding="utf-8"))


def read(folder: Path) -> Any:
    return read_draft(Checkpoint.open(folder))


def refused(folder: Path, what: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=what) as caught:
        read(folder)
    return caught.value


# ---- names


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"root": "medusa_heads."},
        {"spelling": "old", "biases": True, "layers": 2},
        {"spelling": "old", "root": "medusa_head."},
        {"spelling": "tensorrt-llm", "root": "medusa_heads."},
    ],
)
def test_heads_are_known_under_all_their_names(arguments: dict[str, Any], tmp_path: Path) -> None:
    draft = read(tiny_medusa(tmp_path / "draft", **arguments))
    plain = {key: arguments[key] for key in ("biases", "layers") if key in arguments}
    same = read(tiny_medusa(tmp_path / "same", **plain))
    assert draft.family.name == "medusa"
    assert {row.canonical: row.role for row in draft.rows} == {
        row.tensor.name: row.role for row in same.rows
    }
    assert {row.role for row in same.rows} == {"mlp", "head"} | ({"norm"} if plain else set())


def test_a_head_that_all_share(tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", shared_head=True, truncated=40)
    draft = read(folder)
    assert [row.canonical for row in draft.rows if row.role == "head"] == ["lm_heads.0.weight"]
    assert (draft.geometry.num_layers, draft.geometry.draft_vocab_size) == (3, 40)
    tensors = read_tensors(folder)
    tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")  # vLLM takes it under this name
    write_tensors(folder, tensors)
    assert len(read(folder).rows) == len(draft.rows)


@pytest.mark.parametrize(
    ("keys", "heads"),
    [
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, 3),
        ({"num_medusa_heads": 3, "num_medusa_layers": 1}, 3),
        ({"num_heads": 3, "medusa_num_heads": 3, "num_hidden_layers": 1}, 3),
    ],
)
def test_sizes_have_several_names(keys: dict[str, int], heads: int, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft")
    edit_json(folder / "config.json", **{"num_heads": None, "num_hidden_layers": None, **keys})
    assert read(folder).geometry.num_heads == heads


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"medusa_num_heads": 2}, "num_heads 3 and medusa_num_heads 2 contradict each other"),
        ({"num_heads": 2}, r"lm_heads.2.weight: no tensor of medusa|blocks.2.layers.0.weight: no"),
        ({"num_heads": 4}, "of medusa are missing: blocks.3.layers.0.weight"),
        ({"num_heads": 10**9}, "num_heads or num_hidden_layers: 1000000000 layers, but 6 tensors"),
        ({"num_heads": None}, "num_heads: missing key"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive whole number, got 0"),
        ({"vocab_size": None}, "vocab_size: missing key"),
        ({"hidden_size": 32}, r"expected shape \[32, 32\], got \[64, 64\]"),
        ({"medusa_fc_bias": True}, "of medusa are missing: blocks.0.layers.0.bias"),
        ({"medusa_fc_bias": 1}, "medusa_fc_bias: expected true or false, got 1"),
        ({"logit_scale": 0.5}, "logit_scale: expected 1, got 0.5: scaled logits"),
        ({"truncated_vocab_size": 97}, r"truncated_vocab_size: 97 of 96 tokens\n"),
        ({"truncated_vocab_size": 40}, "truncated_vocab_size: 40 of 96 tokens without original_lm"),
        ({"original_lm_head": True}, "lm_heads.1.weight: no tensor of medusa"),
    ],
)
def test_bad_configs(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft")
    edit_json(folder / "config.json", **changes)
    assert refused(folder, what).fix


def test_keys_that_say_how_many_are_named(tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", config={"num_heads": 2})
    assert "correct num_heads or num_hidden_layers" in refused(folder, "no tensor of medusa").fix
    edit_json(folder / "config.json", num_heads=10**9)
    assert refused(folder, "6 tensors in all").fix.endswith("the tensors are those of 3 layer(s)")


def test_a_config_of_two_families(tmp_path: Path) -> None:
    folder = tiny_eagle1(tmp_path / "draft", config={"architectures": ["MedusaModel"]})
    edit_json(folder / "config.json", num_heads=1)
    refused(folder, "config.json declares medusa, but the tensors are those of eagle1-llama")


def test_a_target_with_heads_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", config={"architectures": ["MedusaLlamaForCausalLM"]})
    refused(folder, "it is a target with Medusa heads, which is not supported")


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([*range(39), 96], r"token_map\[39\] = 96 lies outside the vocabulary of 96 \(1 of 40"),
        ([-1, *range(39)], r"token_map\[0\] = -1 lies outside"),
        ([0, *range(39)], "token_map: 1 of 40 ids stand there twice"),
    ],
)
def test_a_token_map_of_other_tokens(ids: list[int], what: str, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", shared_head=True, truncated=40)
    table = Stored("I64", (40,), np.array(ids, dtype="<i8").tobytes())
    write_tensors(folder, {**read_tensors(folder), "token_map": table})
    with pytest.raises(CheckpointError, match=what):
        find_lints(read(folder))


def test_published_pickles_are_converted_and_told_what_config_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FasterDecoding publishes them: medusa_lm_head.pt, and a config.json without sizes."""
    built = tiny_medusa(tmp_path / "built", spelling="old", biases=True, num_heads=5, dtype="F32")
    published, plain = tmp_path / "published", tmp_path / "plain"
    published.mkdir()
    tensors = {
        name: torch.frombuffer(bytearray(stored.data), dtype=torch.float32).reshape(stored.shape)
        for name, stored in read_tensors(built).items()
    }
    torch.save(tensors, published / "medusa_lm_head.pt")
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_layers": 1}
    (published / "config.json").write_text(
        json.dumps({**config, "medusa_num_heads": 2}), encoding="utf-8"
    )
    assert main(["inspect", str(published)]) == 2
    assert "draftquant unpickle" in capsys.readouterr().err
    assert main(["unpickle", str(published), "--out", str(plain)]) == 0
    fix = refused(plain, "architectures: expected a list of one name").fix
    keys = json.loads("{" + fix.removeprefix("add ") + "}")
    assert keys == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 64,
        "vocab_size": 96,
        "medusa_num_heads": 5,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
    }
    edit_json(plain / "config.json", **keys)
    assert read(plain).geometry.num_heads == 5


def test_heads_that_read_the_targets_own_head_are_incomplete(tmp_path: Path) -> None:
    """FasterDecoding's first drafts: blocks alone."""
    folder = tiny_medusa(tmp_path / "draft")
    tensors = {name: t for name, t in read_tensors(folder).items() if "lm_heads" not in name}
    write_tensors(folder, tensors)
    refused(folder, "of medusa are missing: lm_heads.0.weight")


# ---- forward


def scores(draft: LoadedDraft) -> Any:
    """What `served.scores` says of vLLM's module."""
    states, logits = served.states(), []
    for depth in range(draft.geometry.num_heads):
        some = draft.forward.logits(draft.forward.propose(states, depth))
        ids = draft.forward.to_target(torch.arange(some.shape[-1]))
        every = some.new_full((len(states), draft.geometry.vocab_size), -torch.inf)
        every[:, ids] = some
        logits.append(every)
    return torch.tensor(served.scores(logits))


@pytest.mark.parametrize("case", RECORDED)
def test_each_head_is_that_of_vllms_module(case: str, tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", dtype="F32", **served.CASES[case])
    ours, theirs = scores(load_draft(folder)), torch.tensor(RECORDED[case])
    assert torch.equal(ours[..., 0], theirs[..., 0])
    assert ours == pytest.approx(theirs, abs=2e-5)


def test_a_bias_of_a_block_is_missed(tmp_path: Path) -> None:
    case = "two blocks with biases"
    folder = tiny_medusa(tmp_path / "draft", dtype="F32", **served.CASES[case])
    tensors = {name: t for name, t in read_tensors(folder).items() if not name.endswith("bias")}
    write_tensors(folder, tensors)
    edit_json(folder / "config.json", medusa_fc_bias=False)
    assert scores(load_draft(folder)) != pytest.approx(torch.tensor(RECORDED[case]), abs=1e-2)


def test_logits_are_of_one_head_at_a_time(tmp_path: Path) -> None:
    forward = load_draft(tiny_medusa(tmp_path / "draft")).forward
    both = torch.cat([forward.propose(served.states(), depth) for depth in (0, 1)])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="expected hidden states of one depth"):
        forward.logits(both)


def test_nothing_is_rotated(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has no rotary embedding"):
        load_draft(tiny_medusa(tmp_path / "draft"), rope_theta=10000.0)


# ---- plans, lints, engines, estimates


def test_each_block_counts_as_a_layer(tmp_path: Path) -> None:
    draft = read(tiny_medusa(tmp_path / "draft", layers=2))
    plan = make_plan(load_recipe("int4-channel"), draft)
    assert [step.row.canonical for step in plan.quantized] == [
        f"blocks.{i}.layers.{j}.weight" for i in range(3) for j in range(2)
    ]


def test_heads_may_be_quantized_and_never_dropped(tmp_path: Path) -> None:
    draft = read(tiny_medusa(tmp_path / "draft"))
    recipe = load_recipe("fp8-ptpc")
    edited = {action: make_rules(recipe, action) for action in ("quantize", "drop")}
    assert len(make_plan(edited["quantize"], draft).quantized) == 6
    with pytest.raises(
        PlanError, match="engines do not take this table of a medusa draft from the target"
    ):
        make_plan(edited["drop"], draft)


@pytest.mark.parametrize("biases", [False, True])
def test_heads_are_estimated_by_their_name_as_they_are(biases: bool, tmp_path: Path) -> None:
    draft = read(tiny_medusa(tmp_path / "draft", biases=biases))
    (plain,) = candidates_of(draft, [], num_draft_tokens=3, context=100, tp=1)
    assert plain.name == "BF16"


def make_rules(recipe: Any, action: str) -> Any:
    rules = tuple(
        replace(rule, action=action, why=None) if rule.role == ("head",) else rule
        for rule in recipe.rules
    )
    return replace(recipe, rules=rules)


def test_lints_say_what_vllm_did_with_them(tmp_path: Path) -> None:
    folder = tiny_medusa(tmp_path / "draft", spelling="old", root="medusa_head.", biases=True)
    assert [lint.name for lint in find_lints(read(folder))] == ["medusa-names"]
    edit_json(folder / "config.json", medusa_fc_bias=None)
    found = {lint.name: lint for lint in find_lints(read(folder))}
    assert list(found) == ["medusa-biases", "medusa-names"]
    assert found["medusa-biases"].fix == {"medusa_fc_bias": True}


@pytest.mark.parametrize(
    ("model_type", "vllm", "sglang"),
    [
        ("medusa", "has model type `medusa` but", "has model type `medusa` but"),
        (
            "llama",
            r"architectures \['MedusaModel'\] are not supported",
            "'MedusaModel' is not a re",
        ),
        (None, "Should have a `model_type` key", "Should have a `model_type` key"),
    ],
)
def test_check_says_what_the_engines_did(
    model_type: str | None, vllm: str, sglang: str, tmp_path: Path
) -> None:
    """Executed with the loaders of vLLM 0.33.0 and SGLang 0.5.23."""
    folder = tiny_medusa(tmp_path / "draft", config={"model_type": model_type})
    for engine, what in (("vllm", vllm), ("sglang", sglang)):
        found = check_draft(folder, engine=engine)  # type: ignore[arg-type]
        assert found.verdict == "REFUSED"
        assert re.search(what, found.error or "")
        assert found.remedy
        if model_type is not None:
            assert "vLLM 0.32" in found.remedy


def test_a_round_reads_every_block_and_head_once(tmp_path: Path) -> None:
    draft = read(tiny_medusa(tmp_path / "draft"))
    assert checked_num_draft_tokens(draft.geometry, None) == 3
    with pytest.raises(EstimateError, match="expected at most 3, got 4: the draft has 3 heads"):
        checked_num_draft_tokens(draft.geometry, 4)
    weights = plain_weights(draft)
    round_ = draft_round(draft, weights, num_draft_tokens=3, context=100, tp=2)
    (only,) = round_.passes
    assert only.nbytes(1) == only.nbytes(64) == sum(weight.nbytes for weight in weights)
    assert [work.byte_shards for work in only.works] == [1, 1, 1, 2, 2, 2]
