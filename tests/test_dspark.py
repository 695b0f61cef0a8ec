"""The DSpark family: names, config, what is refused, and a draft's way through the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from by_recipe import quantized
from draftquant.quantize.converting.dequantize_draft import dequantize_draft
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.families.dspark import DSpark
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json, read_tensors
from tiny_dspark import tiny_dspark

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"num_layers": 1}


def test_a_mask_embedding_beside_it_is_read_by_no_engine(tmp_path: Path) -> None:
    folder = tiny_dspark(tmp_path / "d", mask_embedding=True, **SMALL)
    geometry = read_draft(Checkpoint.open(folder)).geometry
    with pytest.raises(CheckpointError, match="which no engine reads beside a DSpark draft"):
        DSpark().side_weights(geometry, folder)


def test_it_is_quantized_verified_and_decoded(tmp_path: Path) -> None:
    source = tiny_dspark(tmp_path / "d", num_layers=2)
    quantized(source, "int4-channel", tmp_path / "q", target_layers=8)
    kept, before = read_tensors(tmp_path / "q"), read_tensors(source)
    heads = [name for name in before if "_head." in name]
    assert len(heads) == 4
    assert all(kept[name] == before[name] for name in heads)
    dequantize_draft(DraftSource(folder=tmp_path / "q"), tmp_path / "back")
    assert read_tensors(tmp_path / "back").keys() == before.keys()
    for engine in ("vllm", "sglang"):
        said = check_draft(tmp_path / "q", engine=engine, arch="sm90", target_layers=8)  # type: ignore[arg-type]
        assert said.verdict == "LOADS", said.error
        launch = said.launch or ""
        assert '"method": "dspark"' in launch or "--speculative-algorithm DSPARK" in launch
        assert '"num_speculative_tokens": 8' in launch or "-num-draft-tokens 9" in launch
    edit_json(source / "config.json", architectures=["DSparkDraftModel"], model_type="llama")
    other = check_draft(source, engine="vllm")
    assert other.verdict == "UNKNOWN"
    assert other.error == "vLLM takes a draft of model_type llama for DeepSeek-V4's own"


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
