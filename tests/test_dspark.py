"""The DSpark family: names, config, what is refused, and a draft's way through the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.passes.proposals import num_draft_tokens_fault
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.families.dspark import DSpark
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import CheckpointError, PlanError
from tiny import edit_json, read_tensors
from tiny_dspark import Layout, tiny_dspark

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"num_layers": 1}


def refused(folder: Path, what: str, fix: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read_draft(Checkpoint.open(folder))
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize("layout", ["flat", "specforge", "logit_head"])
def test_every_spelling_is_the_same_draft(layout: Layout, tmp_path: Path) -> None:
    draft = read_draft(Checkpoint.open(tiny_dspark(tmp_path / "d", layout=layout)))
    assert draft.family.name == "dspark"
    own = {row.canonical for row in draft.rows if row.role == "proposal"}
    assert own == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }


def test_modelopt_names_heads_and_architecture_in_its_own_way(tmp_path: Path) -> None:
    draft = read_draft(Checkpoint.open(tiny_dspark(tmp_path / "d", layout="modelopt", **SMALL)))
    assert draft.family.name == "dspark"
    assert draft.row("markov_head.markov_w1.weight") is not None
    assert draft.row("confidence_head.proj.bias") is not None


def test_the_anchor_proposes_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    for from_anchor, most in ((True, 8), (False, 7)):
        folder = tiny_dspark(tmp_path / str(most), from_anchor=from_anchor, **SMALL)
        geometry = read_draft(Checkpoint.open(folder)).geometry
        assert geometry.most_draft_tokens == most
        assert num_draft_tokens_fault(geometry, most) is None
        fault = num_draft_tokens_fault(geometry, most + 1)
        assert fault is not None
        assert f"expected at most {most}, got {most + 1}: the draft fills blocks of 8" in fault[0]
        assert ("the first of them is given" in fault[0]) == (not from_anchor)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"markov_rank": None}, "markov_rank: missing key"),
        ({"markov_rank": 0}, "markov_rank: expected a positive whole number, got 0"),
        ({"markov_rank": 24}, "(disagrees with "),
        ({"markov_head_type": "gated"}, "markov_head_type: expected 'vanilla', got 'gated'"),
        ({"markov_head_type": ["rnn"]}, "markov_head_type: expected 'vanilla', got ['rn"),
        ({"confidence_head_with_markov": False}, "expected shape [1, 64], got [1, 80]"),
        ({"confidence_head_with_markov": 1}, "confidence_head_with_markov: expected true or false"),
        ({"block_size": None}, "block_size: missing key"),
        ({"dspark_draft_topk": 8}, "dspark_draft_topk: expected None, got 8: vLLM corrects that"),
        ({"logit_scale": 0.5}, "logit_scale: expected 1, got 0.5"),
        ({"dspark_config": {"markov_rank": 16}}, "dspark_config: expected None"),
        ({"projector_type": "gru"}, "projector_type: expected 'dspark', got 'gru'"),
        ({"dflash_config": {"markov_rank": 8}}, "markov_rank: 16 beside dflash_config.markov_rank"),
        ({"dspark_block_size": 7}, "block_size: 8 beside dspark_block_size: 7, and engines differ"),
        ({"dspark_noise_token_id": 3}, "mask_token_id: 95 beside dspark_noise_token_id: 3"),
        (
            {"dspark_bonus_anchor": True},
            "True at the top level, where engines read it, but dspark_b",
        ),
        ({"shift_label": False}, "where engines read it, but shift_label says False"),
        (
            {"dflash_config": {"sample_from_anchor": False}},
            "but dflash_config.sample_from_anchor says False",
        ),
    ],
)
def test_what_is_no_dspark_as_engines_serve_it(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = tiny_dspark(tmp_path / "d", **SMALL)
    edit_json(folder / "config.json", **changes)
    refused(folder, what)


def test_config_of_one_family_and_tensors_of_another(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", layout="specforge", **SMALL)
    nested = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dflash_config"]
    plain = {key: nested[key] for key in ("mask_token_id", "target_layer_ids")}
    edit_json(folder / "config.json", architectures=["DFlashDraftModel"], dflash_config=plain)
    refused(
        folder, "config.json declares dflash, but the tensors are those of dspark", "use the config"
    )


def test_a_mask_embedding_beside_it_is_read_by_no_engine(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", mask_embedding=True, **SMALL)
    geometry = read_draft(Checkpoint.open(folder)).geometry
    with pytest.raises(CheckpointError, match="which no engine reads beside a DSpark draft"):
        DSpark().side_weights(geometry, folder)


@pytest.mark.parametrize("recipe", ["fp8-ptpc", "int4-channel"])
def test_it_is_quantized_verified_and_decoded(recipe: str, tmp_path: Path) -> None:
    source = tiny_dspark(tmp_path / "d", num_layers=2)
    draft = read_draft(Checkpoint.open(source))
    plan = make_plan(load_recipe(recipe), draft, target_layers=8)
    quantize_draft(plan, tmp_path / "q", source=DraftSource(folder=source))
    kept, before = read_tensors(tmp_path / "q"), read_tensors(source)
    heads = [name for name in before if "_head." in name]
    assert len(heads) == 4
    assert all(kept[name] == before[name] for name in heads)
    dequantize_draft(DraftSource(folder=tmp_path / "q"), tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == before.keys()
    for engine in ("vllm", "sglang"):
        said = check_draft(tmp_path / "q", engine=engine, arch="sm90", target_layers=8)  # type: ignore[arg-type]
        assert said.verdict == "LOADS", said.error


def test_its_head_is_quantized_by_no_recipe(tmp_path: Path) -> None:
    draft = read_draft(Checkpoint.open(tiny_dspark(tmp_path / "d", **SMALL)))
    text = (Path(__file__).parents[1] / "recipes/fp8-ptpc.yaml").read_text(encoding="utf-8")
    path = tmp_path / "own.yaml"
    path.write_text(
        text.replace("name: fp8-ptpc", "name: own").replace(
            "{role: proposal, action: keep", "{role: proposal, action: quantize"
        ),
        encoding="utf-8",
    )
    with pytest.raises(PlanError, match=r"role proposal.* cannot be quantized: it is not a linear"):
        make_plan(load_recipe(str(path)), draft)


def test_vllm_takes_a_draft_of_another_type_for_deepseeks_own(tmp_path: Path) -> None:
    changes = {"architectures": ["DSparkDraftModel"], "model_type": "llama"}
    said = check_draft(tiny_dspark(tmp_path / "d", config=changes, **SMALL), engine="vllm")
    assert said.verdict == "UNKNOWN"
    assert said.error == "vLLM takes a draft of model_type llama for DeepSeek-V4's own"


def test_commands_that_serve_it(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", config={"torch_dtype": "bfloat16"}, **SMALL)
    ours = check_draft(folder, engine="vllm", arch="sm90").launch or ""
    assert '"method": "dspark"' in ours
    assert '"num_speculative_tokens": 8' in ours
    theirs = check_draft(folder, engine="sglang", arch="sm90").launch or ""
    assert "--speculative-algorithm DSPARK" in theirs
    assert "--speculative-num-draft-tokens 9" in theirs


def test_speculators_spell_it_with_layers_of_their_own(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", **SMALL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = {key: config[key] for key in ("block_size", "mask_token_id", "markov_rank")}
    ids = [i + 1 for i in config.pop("target_layer_ids")]
    layers = {key: value for key, value in config.items() if key not in own}
    spelled = {
        **own,
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark"},
        "aux_hidden_state_layer_ids": ids,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "transformer_layer_config": {
            **layers,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
        },
    }
    (folder / "config.json").write_text(json.dumps(spelled), encoding="utf-8")
    draft = read_draft(Checkpoint.open(folder))
    assert draft.family.name == "dspark"
    assert draft.geometry.most_draft_tokens == 8
    assert draft.geometry.aux_layer_ids == (1, 3, 5)
    assert check_draft(folder, engine="vllm", arch="sm90").verdict == "LOADS"
    edit_json(folder / "config.json", sample_from_anchor=None)  # vLLM's default, not the package's
    assert read_draft(Checkpoint.open(folder)).geometry.most_draft_tokens == 7
