"""Faults in the config.json of EAGLE-3 Llama drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.errors import CheckpointError
from draftquant.quantize.files.checkpoint import Checkpoint
from tiny import edit_json, read_tensors, tiny_eagle3_llama, write_tensors


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read_draft(Checkpoint.open(folder))
    assert caught.value.where.startswith(str(folder / "config.json"))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.fix


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_llama(tmp_path / "draft")


@pytest.mark.parametrize(
    ("architectures", "what"),
    [
        (["GPT2LMHeadModel"], "'GPT2LMHeadModel' is no draft family"),
        ([7], "7 is no draft family"),
        ([["LlamaForCausalLMEagle3"]], "['LlamaForCausalLMEagle3'] is no draft family"),
        ([], "expected a list of one name, got []"),
        (["a", "b"], "expected a list of one name, got ['a', 'b']"),
        ("LlamaForCausalLMEagle3", "expected a list of one name, got 'Llama"),
        (None, "expected a list of one name, got None"),
    ],
)
def test_architectures(architectures: object, what: str, draft: Path) -> None:
    edit_json(draft / "config.json", architectures=architectures)
    refused(draft, f"architectures: {what}")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Eagle3LlamaForCausalLM"])
def test_other_names_of_the_same_draft(name: str, draft: Path) -> None:
    plain = read_draft(Checkpoint.open(draft))
    edit_json(draft / "config.json", architectures=[name])
    named = read_draft(Checkpoint.open(draft))
    assert (named.family, named.geometry, named.rows) == (
        plain.family,
        plain.geometry,
        plain.rows,
    )


def test_an_ordinary_model_is_no_draft_whatever_engines_call_theirs(draft: Path) -> None:
    tensors = read_tensors(draft)
    del tensors["fc.weight"]
    write_tensors(draft, tensors)
    edit_json(draft / "config.json", architectures=["LlamaForCausalLM"])
    refused(draft, "architectures: 'LlamaForCausalLM' is no draft family")


def test_tensors_without_the_marks_of_any_family(draft: Path) -> None:
    tensors = read_tensors(draft)
    del tensors["fc.weight"], tensors["midlayer.hidden_norm.weight"]
    write_tensors(draft, tensors)
    with pytest.raises(CheckpointError, match=r"2 tensor.s. of eagle3-llama are missing, first fc"):
        read_draft(Checkpoint.open(draft))


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_are_refused(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: True})
    refused(draft, f"{key}: expected false, got true", "cannot be quantized")


def test_another_activation_than_silu_is_refused(draft: Path) -> None:
    edit_json(draft / "config.json", hidden_act="gelu")
    refused(draft, "hidden_act: expected 'silu'", "cannot be replayed")


def test_number_of_layers_that_no_file_has(draft: Path) -> None:
    edit_json(draft / "config.json", num_hidden_layers=10**12)
    refused(draft, "num_hidden_layers: 1000000000000 layers, but 14 tensors", "correct 'num_hid")


REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")


@pytest.mark.parametrize("key", [*REQUIRED, "num_attention_heads", "rope_theta"])
def test_missing_key(key: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: None})
    refused(draft, f"{key}: missing key", f"add '{key}' as the draft was trained with it")


NO_IDS = "distinct layer numbers in ascending order"
WRONG: list[tuple[str, Any, str]] = [
    *(("hidden_size", value, "a positive whole number") for value in (0, -1, 64.0, "64", True, [])),
    ("head_dim", 0, "a positive whole number"),
    ("draft_vocab_size", "96", "a positive whole number"),
    *(("rms_norm_eps", value, "a positive number") for value in (0, -1e-6, "x", True, -(10**40))),
    ("rope_theta", [], "a positive number"),
    ("rope_scaling", "yarn", "an object"),
    ("rope_parameters", [1], "an object"),
    ("eagle_config", [1], "an object"),
    ("norm_before_residual", 1, "true or false"),
    ("fc_norm", "yes", "true or false"),
    ("attention_bias", "no", "true or false"),
    *(
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": ids}, NO_IDS)
        for ids in ([], [3, 1], [1, 1], [-1], [1.0], ["1"], [True], "1", 1, {})
    ),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG, ids=lambda value: repr(value)[:40])
def test_config_value_of_the_wrong_type(key: str, value: Any, expected: str, draft: Path) -> None:
    edit_json(draft / "config.json", **{key: value})
    refused(draft, f": expected {expected}, got ", "correct '")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_number_that_is_not_finite(value: str, draft: Path) -> None:
    path = draft / "config.json"
    text = json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": "?"})
    path.write_text(text.replace('"?"', value))
    refused(draft, "rms_norm_eps: expected a positive number, got ", "correct 'rms_norm_eps'")


def test_unknown_rope_type(draft: Path) -> None:
    edit_json(draft / "config.json", rope_scaling={"rope_type": "llama3", "factor": 8})
    refused(draft, "rope type 'llama3' is not one of 'default', 'yarn'", "only these two")


def test_more_heads_than_channels_leave_no_width_for_a_head(draft: Path) -> None:
    edit_json(draft / "config.json", num_attention_heads=65, head_dim=None)
    refused(draft, "head_dim: expected a positive whole number, got 0", "correct 'head_dim'")
