"""Drafts in the speculators layout: what is read from them, and what is refused.

What is expected of config.json was executed: speculators 0.9.0 saved tiny drafts whose keys and
tensors tiny_speculators.py repeats, vLLM 0.33 translated such configs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.drafts.recognition import is_speculators, plain_config
from draftquant.quantize.drafts.shared.eagle3 import Eagle3Geometry
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.recipes.errors import CheckpointError
from draftquant.scripts.cli import main
from tiny import Stored, edit_json, read_tensors, tiny_eagle3_llama, write_tensors
from tiny_speculators import BUILD, YARN, tiny_speculators_dflash, tiny_speculators_eagle3


def read(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


def layers_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return dict(found["transformer_layer_config"])


def change_layers(folder: Path, **changes: Any) -> None:
    kept = {k: v for k, v in (layers_of(folder) | changes).items() if v is not None}
    edit_json(folder / "config.json", transformer_layer_config=kept)


SUPPORTED = "supported: dflash, dflash2, dspark, eagle3"


# What is read


def test_a_plain_config_is_returned_as_it_is() -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}
    assert not is_speculators(config)
    assert plain_config(config, "config.json") is config


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_an_eagle3_draft_is_the_same_as_its_plain_twin(architecture: str, tmp_path: Path) -> None:
    twin = tiny_eagle3_llama(
        tmp_path / "plain", prefix="layers.0.", pruned_vocabulary=True,
        config={"norm_before_residual": True},
    )  # fmt: skip
    found = read(
        tiny_speculators_eagle3(tmp_path / "draft", config={"architectures": [architecture]})
    )
    expected = read(twin)
    assert found.family is expected.family
    assert found.geometry == expected.geometry
    assert [(r.canonical, r.role) for r in found.rows] == [
        (r.canonical, r.role) for r in expected.rows
    ]


def test_qwen3_layers_have_normed_queries_and_keys(tmp_path: Path) -> None:
    found = read(tiny_speculators_eagle3(tmp_path / "draft", layer_type="qwen3", num_layers=2))
    assert isinstance(found.geometry, Eagle3Geometry)
    assert found.geometry.attention.qk_norm
    norms = {
        r.canonical: r.role
        for r in found.rows
        if r.canonical.endswith(("q_norm.weight", "k_norm.weight"))
    }
    assert norms == {
        f"layers.{i}.self_attn.{x}_norm.weight": "norm" for i in range(2) for x in "qk"
    }
    assert sum(r.role == "attention" for r in found.rows) == 8


@pytest.mark.parametrize("architecture", ["DFlashSpeculator", "DFlashDraftModel"])
@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("pruned", [True, False])
def test_dflash(architecture: str, embed: bool, pruned: bool, tmp_path: Path) -> None:
    folder = tiny_speculators_dflash(
        tmp_path / "draft", embed=embed, pruned_vocabulary=pruned,
        config={"architectures": [architecture]},
    )  # fmt: skip
    found = read(folder)
    assert found.family.name == "dflash"
    assert found.geometry.aux_layer_ids == (1, 3, 4)
    assert (found.geometry.block_size, found.geometry.num_layers) == (8, 2)
    assert found.geometry.draft_vocab_size == (48 if pruned else 96)
    assert {row.canonical for row in found.rows} == set(read_tensors(folder))
    assert sum(row.role in ("attention", "mlp") for row in found.rows) == 14


@pytest.mark.parametrize(("key", "causal"), [(None, False), (False, True), (True, False)])
def test_a_block_is_as_causal_as_vllm_serves_it(
    key: bool | None, causal: bool, tmp_path: Path
) -> None:
    """Executed on vLLM 0.33: `update_dflash`, then `_dflash_layer_causal` of a full layer."""
    folder = tiny_speculators_dflash(tmp_path / "d", config={"sliding_window_non_causal": key})
    assert (
        "sliding_window_non_causal"
        in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ) == (key is not None)
    geometry: Any = read(folder).geometry
    assert [geometry.is_causal(i) for i in range(2)] == [causal, causal]


@pytest.mark.parametrize(("key", "expected"), [(None, True), (False, False), (True, True)])
def test_a_missing_norm_before_residual_is_what_vllm_serves(
    key: bool | None, expected: bool, tmp_path: Path
) -> None:
    geometry: Any = read(
        tiny_speculators_eagle3(tmp_path / "draft", config={"norm_before_residual": key})
    ).geometry
    assert geometry.norm_before_residual is expected


def test_options_stand_at_the_top(tmp_path: Path) -> None:
    folder = tiny_speculators_eagle3(
        tmp_path / "draft",
        config={
            "fc_norm": True,
            "norm_output": True,
            "target_hidden_size": 32,
            "eagle_aux_hidden_state_layer_ids": [1, 6],
        },
    )
    row = Stored("BF16", (32,), bytes(64))
    changed = {f"fc_norm.{i}.weight": row for i in range(2)}
    changed["fc.weight"] = Stored("BF16", (64, 64), bytes(64 * 64 * 2))
    write_tensors(folder, read_tensors(folder) | changed)
    geometry: Any = read(folder).geometry
    assert (geometry.fc_norm, geometry.norm_output, geometry.norm_before_fc) == (True, True, False)
    assert (geometry.target_hidden_size, geometry.aux_layer_ids) == (32, (0, 5))


def test_without_aux_layer_ids_the_default_ones(tmp_path: Path) -> None:
    config = {"eagle_aux_hidden_state_layer_ids": None}
    geometry = read(tiny_speculators_eagle3(tmp_path / "draft", config=config)).geometry
    assert (geometry.aux_layer_ids, geometry.num_aux_layers) == (None, 3)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": YARN | {"rope_theta": 5e4}},
        {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": YARN},
    ],
    ids=["transformers-5", "transformers-4"],
)
def test_rope_in_both_spellings(rope: dict[str, Any], build: str, tmp_path: Path) -> None:
    folder = BUILD[build](tmp_path / "draft")
    change_layers(folder, **rope)
    geometry: Any = read(folder).geometry
    assert geometry.rope.theta == 5e4
    assert geometry.rope.yarn.factor == 8.0


# What is refused


@pytest.mark.parametrize(
    ("build", "changes", "what", "fix"),
    [
        ("eagle3-llama", {"transformer_layer_config": None},
         "transformer_layer_config: missing key", "save the draft again"),
        ("dflash", {"transformer_layer_config": None},
         "transformer_layer_config: missing key", "save the draft again"),
        ("eagle3-llama", {"transformer_layer_config": [64]},
         "transformer_layer_config: expected an object, got [64]", "correct"),
        ("eagle3-llama", {"speculators_model_type": None},
         "speculators_model_type: missing key", SUPPORTED),
        ("eagle3-llama", {"speculators_model_type": "medusa"},
         "speculators_model_type: 'medusa' is not supported", SUPPORTED),
        ("dflash", {"speculators_model_type": "dflash3"},
         "speculators_model_type: 'dflash3' is not supported", SUPPORTED),
        ("eagle3-llama", {"speculators_model_type": ["eagle3"]},
         "speculators_model_type: ['eagle3'] is not supported", SUPPORTED),
        ("eagle3-llama", {"speculators_model_type": "dflash"},
         "architectures: expected ['DFlashSpeculator'], got ['Eagle3Speculator'] beside"
         " speculators_model_type 'dflash'", "correct the one"),
        ("dflash", {"architectures": ["LlamaForCausalLMEagle3"]},
         "architectures: expected ['DFlashSpeculator'], got ['LlamaForCausalLMEagle3'] beside"
         " speculators_model_type 'dflash'", "correct the one"),
        ("dflash", {"architectures": None},
         "architectures: expected ['DFlashSpeculator'], got None", "correct the one"),
        ("dflash", {"architectures": [{}]},
         "architectures: expected ['DFlashSpeculator'], got [{}]", "correct the one"),
        ("eagle3-llama", {"norm_before_fc": True, "fc_norm": True},
         "norm_before_fc and fc_norm are both true", "keep the one"),
        ("eagle3-llama", {"norm_before_residual": "yes"},
         "norm_before_residual: expected true or false, got 'yes'", "correct"),
        ("eagle3-llama", {"draft_vocab_size": -1},
         "draft_vocab_size: expected a positive whole number, got -1", "correct"),
        ("eagle3-llama", {"eagle_aux_hidden_state_layer_ids": [0, 4]},
         "eagle_aux_hidden_state_layer_ids: expected ids from 1 (the output of layer 0)",
         "not supported"),
        ("eagle3-llama", {"eagle_aux_hidden_state_layer_ids": [4, 2]},
         "eagle_aux_hidden_state_layer_ids: expected distinct layer numbers in", "correct"),
        ("dflash", {"aux_hidden_state_layer_ids": None},
         "aux_hidden_state_layer_ids: missing key", "add 'aux_hidden_state_layer_ids'"),
        ("dflash", {"aux_hidden_state_layer_ids": [0, 2, 4]},
         "aux_hidden_state_layer_ids: expected ids from 1", "not supported"),
        ("dflash", {"mask_token_id": None}, "mask_token_id: missing key", "add 'mask_token_id'"),
        ("dflash", {"mask_token_id": 96}, "mask_token_id: expected a token id in [0, 96)", "give"),
        ("dflash", {"block_size": None}, "block_size: missing key", "add 'block_size'"),
        ("dflash", {"sample_from_anchor": True},
         "sample_from_anchor: expected false, got true", "vLLM refuses it"),
        ("dflash", {"sliding_window_non_causal": 1},
         "sliding_window_non_causal: expected true or false, got 1", "correct"),
    ],
)  # fmt: skip
def test_config_faults(
    build: str, changes: dict[str, Any], what: str, fix: str, tmp_path: Path
) -> None:
    folder = BUILD[build](tmp_path / "draft")
    edit_json(folder / "config.json", **changes)
    refused(folder, what, fix)


@pytest.mark.parametrize(
    ("build", "changes", "what"),
    [
        ("eagle3-llama", {"model_type": "gemma3_text"}, "model_type: expected 'llama' or 'qwen3'"),
        ("eagle3-llama", {"model_type": None}, "model_type: expected 'llama' or 'qwen3', got None"),
        ("eagle3-llama", {"model_type": {}}, "model_type: expected 'llama' or 'qwen3', got {}"),
        ("eagle3-qwen3", {"rms_norm_eps": None}, "rms_norm_eps: missing key"),
        ("dflash", {"hidden_size": None}, "hidden_size: missing key"),
        ("eagle3-qwen3", {"layer_types": ["linear_attention"]},
         "layer_types: expected full_attention or sliding_attention for every layer, got ['linear"),
        ("eagle3-qwen3", {"layer_types": 1}, "layer_types: expected full_attention or sliding"),
        ("eagle3-qwen3", {"attention_bias": True}, "attention_bias: expected false"),
    ],
)  # fmt: skip
def test_faults_of_the_layers_name_their_section(
    build: str, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = BUILD[build](tmp_path / "draft")
    change_layers(folder, **changes)
    error = refused(folder, what)
    assert error.where == f"{folder / 'config.json'}: transformer_layer_config"


def test_qwen3_and_llama_layers_are_told_apart(tmp_path: Path) -> None:
    llama = tiny_speculators_eagle3(tmp_path / "llama")
    change_layers(llama, model_type="qwen3")
    refused(llama, "2 tensor(s) of eagle3-llama are missing: layers.0.self_attn.q_norm")
    qwen3 = tiny_speculators_eagle3(tmp_path / "qwen3", layer_type="qwen3")
    change_layers(qwen3, model_type="llama")
    refused(qwen3, "layers.0.self_attn.k_norm.weight: no tensor of eagle3-llama has this name")


def test_the_tensors_must_be_those_of_the_kind(tmp_path: Path) -> None:
    folder = tiny_speculators_dflash(tmp_path / "dflash")
    eagle3 = tiny_speculators_eagle3(tmp_path / "eagle3", layer_type="qwen3")
    write_tensors(folder, read_tensors(eagle3))
    refused(folder, "config.json declares dflash, but the tensors are those of eagle3-llama")


def test_weights_of_the_verifier_are_no_part_of_a_draft(tmp_path: Path) -> None:
    """The package never saves them."""
    folder = tiny_speculators_eagle3(tmp_path / "draft")
    stray = {"verifier_norm.weight": Stored("BF16", (64,), bytes(128))}
    write_tensors(folder, read_tensors(folder) | stray)
    refused(folder, "verifier_norm.weight: no tensor of eagle3-llama has this name")


def refused(folder: Path, what: str, fix: str = "") -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.where.startswith(str(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.fix
    return caught.value


# What is printed


@pytest.mark.some(1)
@pytest.mark.parametrize("build", BUILD)
def test_inspect_names_the_layout(
    build: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = BUILD[build](tmp_path / "draft")
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speculators_layout"] is True
    assert main(["inspect", str(folder)]) == 0
    assert "Speculator, speculators layout)" in " ".join(capsys.readouterr().out.split())
    plain = tiny_eagle3_llama(tmp_path / "plain")
    assert main(["inspect", str(plain)]) == 0
    assert "speculators layout" not in " ".join(capsys.readouterr().out.split())
