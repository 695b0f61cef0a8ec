"""Keys that config.json lacks: what the class of its model_type fills in, and what follows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from draftquant import api as dq
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.config_defaults import as_read, class_defaults
from draftquant.quantize.drafts.rope import Unreplayed, Yarn
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.catalogue import find_lints
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.dev.config_defaults import OUT, classes, row
from tiny import edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash

ROWS: dict[str, dict[str, Any]] = json.loads(OUT.read_text(encoding="utf-8"))
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LITERAL: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-06},
    "gpt_oss": {
        "sliding_window": 128, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05,
        "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 150000.0, "rope_parameters": YARN,
    },
    "glm4": {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07,
        "attention_bias": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def oss(to: Path, **config: Any) -> Path:
    """A Llama draft under gpt_oss, without the keys that this class fills in."""
    draft = tiny_eagle3_llama(to, config={"model_type": "gpt_oss", **config})
    keys = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    del keys["rope_theta"]
    (draft / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return draft


def lints_of(draft: Path) -> dict[str, Any]:
    return {lint.name: lint for lint in find_lints(read_draft(Checkpoint.open(draft)))}


def test_the_rows_are_those_of_the_pinned_transformers() -> None:
    pins = (OUT.parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert f"transformers=={ROWS['transformers']['transformers']}\n" in pins
    assert transformers.__version__ == ROWS["transformers"]["transformers"]
    assert {name: found["transformers"] for name, found in ROWS.items()} == {
        "transformers": "5.23.0", "vllm": "5.20.2", "sglang": "5.19.0",
    }  # fmt: skip


@pytest.mark.slow
def test_classes_are_asked_again() -> None:
    asked = classes(None)
    for name, literal in LITERAL.items():
        assert ROWS["transformers"]["types"][name] == literal == row(asked[name])


def test_absent_keys_are_the_class_s_and_given_ones_stay() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 3, "head_dim": 32}
    assert as_read(config) == {
        **config, "sliding_window": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 150000.0, "rope_parameters": YARN,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert "rope_parameters" not in as_read({**config, **linear})
    assert as_read({**config, "rope_scaling": None})["rope_parameters"] == YARN
    assert as_read({**config, "rope_parameters": None})["rope_parameters"] is None
    inner = as_read({"model_type": "x", "text_config": {"model_type": "mixtral"}})["text_config"]
    assert inner["rope_theta"] == 1000000.0


def test_what_is_not_known_is_told_apart() -> None:
    assert class_defaults("no_such_type") == class_defaults(None) == "unknown"
    assert class_defaults("falcon") == "refused"
    assert class_defaults("internlm3") != "unknown"
    assert class_defaults("internlm3", "vllm") == class_defaults("internlm3", "sglang") == "unknown"
    assert class_defaults("kimi_k2") == class_defaults("deepseek_v3", "sglang")


def test_geometry_replay_and_lints_take_the_class(tmp_path: Path) -> None:
    draft = oss(tmp_path / "draft", layer_types=["full_attention"])
    rope = read_draft(Checkpoint.open(draft)).geometry.rope
    assert rope is not None
    assert rope.theta == 150000.0
    assert isinstance(rope.yarn, Yarn)
    assert (rope.yarn.factor, rope.yarn.truncate) == (32.0, False)
    found = lints_of(draft)
    assert "then use base 150000, which model_type gpt_oss fills in" in (
        found["rope-theta-missing"].cause
    )
    assert "attention_bias true" in found["model-type"].cause
    assert "rope_theta 150000.0" in found["model-type"].cause
    glm = tiny_eagle3_llama(tmp_path / "glm", config={"model_type": "glm4"})
    part = read_draft(Checkpoint.open(glm)).geometry.rope
    assert part is not None
    assert isinstance(part.scaling, Unreplayed)
    same = tiny_eagle3_llama(tmp_path / "same", config={"model_type": "mistral"})
    assert "model-type" not in lints_of(same)


@pytest.mark.some(1)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_fix_config_writes_llama_and_keeps_what_is_computed(tmp_path: Path, engine: Any) -> None:
    draft = oss(tmp_path / "draft")
    before = check_draft(draft, engine=engine, arch="sm90")
    assert before.verdict == "LOADS BUT WRONG"
    assert "_proj.bias stays uninitialised" in str(before.error)
    assert "those of its model_type" in str(before.remedy)
    with pytest.warns(dq.DraftQuantWarning):
        report = dq.quantize(draft, "int4-channel", tmp_path / "out", fix_config=True)
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["model_type"] == "llama"
    assert (written["rope_theta"], written["rope_parameters"]) == (150000.0, YARN)
    assert (written["layer_types"], written["sliding_window"]) == (["sliding_attention"], 128)
    assert report.verification.ok
    assert dq.verify(tmp_path / "out", draft).ok
    computed = read_draft(Checkpoint.open(draft)).geometry
    edit_json(draft / "config.json", **report.config_changes)
    assert read_draft(Checkpoint.open(draft)).geometry == computed
    assert check_draft(draft, engine=engine, arch="sm90").verdict == "LOADS"


def test_a_mask_that_is_not_said_is_needed_by_forward_passes_alone(tmp_path: Path) -> None:
    draft = tiny_dflash(tmp_path / "draft")
    nested = json.loads((draft / "config.json").read_text(encoding="utf-8"))["dflash_config"]
    del nested["mask_token_id"]
    edit_json(draft / "config.json", dflash_config=nested)
    read = read_draft(Checkpoint.open(draft))
    assert read.geometry.mask_token_id is None
    with pytest.raises(CheckpointError, match=re.escape("mask_token_id: missing key")):
        read.family.forward(read.geometry, {}, lambda _name, x: x)
    with pytest.warns(dq.DraftQuantWarning):
        assert dq.quantize(draft, "int4-channel", tmp_path / "out").verification.ok
    assert check_draft(draft, engine="sglang", arch="sm90").verdict == "LOADS"
    vllm = check_draft(draft, engine="vllm", arch="sm90")
    assert (vllm.verdict, vllm.remedy) == (
        "REFUSED", "add mask_token_id, as the draft was trained with it",
    )  # fmt: skip
