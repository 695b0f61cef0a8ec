"""What families read: every spelling of names and keys is one draft, with its roles and numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from by_recipe import draft_of
from draftquant.calibration.passes.draft_inputs import check_reads_layers
from draftquant.calibration.recording.target_shape import TargetShape, chosen_layers, feature_spec
from draftquant.quantize.drafts.architectures import declared_architecture
from draftquant.quantize.drafts.config_reader import KEY, SECTION, read_aux_layer_ids
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError, TraceError
from draftquant.scripts.cli import main
from tiny import change, edit_json, tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla


def test_what_other_trainers_write_is_the_same_draft(tmp_path: Path) -> None:
    """Names, 36 layers of the target, and keys that follow from others."""
    folder = tiny_eagle3_llama(tmp_path / "draft")
    plain = draft_of(folder)
    absent = dict.fromkeys(("head_dim", "draft_vocab_size"))
    own = (plain.family, plain.geometry, plain.rows)
    names = ["LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "CosyVoice3Eagle3LlamaForCausalLM"]
    for name in names:
        edit_json(folder / "config.json", architectures=[name], num_hidden_layers=36, **absent)
        found = draft_of(folder)
        assert (found.family, found.geometry, found.rows) == own


@pytest.mark.parametrize(
    ("architectures", "name"),
    [(["A"], "A"), (["A", "B"], ""), ([], ""), ("A", ""), (None, ""), ([1], "")],
)
def test_only_one_name_is_the_declared_architecture(architectures: object, name: str) -> None:
    assert declared_architecture({"architectures": architectures}) == name


def test_what_latent_attention_is_not_served_with_is_needed_by_passes_alone(tmp_path: Path) -> None:
    folder = tiny_eagle3_mla(tmp_path / "draft", architecture="Eagle3DeepseekV3ForCausalLM")
    scaling = draft_of(folder).checkpoint.config["rope_scaling"]
    edit_json(folder / "config.json", rope_scaling=scaling | {"attention_factor": 1.0})
    with pytest.raises(CheckpointError):
        load_draft(folder)
    assert draft_of(folder).geometry.num_layers == 1


# ---- layers of the target, in two places and two conventions


@pytest.mark.parametrize(
    ("top", "nested", "model_type", "after", "spelling"),
    [
        (None, None, "llama", None, "default"),
        (None, [2, 30, 58], "llama", (2, 30, 58), "nested"),
        (None, [1, 29, 57], "kimi_k2", (1, 29, 57), "nested"),
        (None, [2, 30, 58], "kimi_k2", (1, 29, 57), "nested-inputs"),
        (None, [2, 30, 58], "deepseek_v3", (1, 29, 57), "nested-inputs"),
        ([2, 30, 58], None, "llama", (1, 29, 57), "top"),
        ([2, 30, 58], [1, 29, 57], "kimi_k2", (1, 29, 57), "portable"),
        ([2, 30, 58], [2, 30, 58], "kimi_k2", (1, 29, 57), "equal"),
        ([2, 30, 58], [1, 29, 56], "llama", None, "one more, or equal"),
        ([0, 1, 2], None, "llama", None, "the input of layer 0 is the embedding"),
        (None, [32, 1, 17], "llama", None, "the order in which layers run"),
    ],
)
def test_which_layers_are_read(
    top: Any, nested: Any, model_type: str, after: tuple[int, ...] | None, spelling: str
) -> None:
    config = {"model_type": model_type, KEY: top, SECTION: {KEY: nested}}
    if " " not in spelling:
        found = read_aux_layer_ids(config, "config.json")
        assert (found.after, found.spelling) == (after, spelling)
        return
    with pytest.raises(CheckpointError):  # in these words
        read_aux_layer_ids(config, "draft/config.json")


def test_a_draft_that_reads_the_last_hidden_state_has_no_fc(tmp_path: Path) -> None:
    last = {"use_aux_hidden_state": False, KEY: []}
    folder = tiny_eagle3_llama(tmp_path / "draft", config={SECTION: last, "fc_norm": True})
    with pytest.raises(CheckpointError):
        draft_of(folder)
    change(folder, fc__weight=None)
    geometry: Any = draft_of(folder).geometry
    assert (geometry.fuses, geometry.fc_norm, geometry.aux_layer_ids) == (False, False, None)
    assert main(["inspect", str(folder)]) == 0
    loaded = load_draft(folder)
    rows = torch.randn(1, 5, 64)
    assert torch.equal(loaded.forward.fuse(rows), rows)
    shape = TargetShape(num_layers=8, vocab_size=96, hidden_size=64, max_positions=None)
    assert chosen_layers(None, loaded, shape) == (7,)
    spec = feature_spec(shape, (7,), loaded, "float32")
    assert (spec.kind, spec.width, spec.fusion_sha256) == ("fused", 64, loaded.fusion_sha256)
    with pytest.raises(TraceError):
        chosen_layers([1, 3, 4], loaded, shape)
    with pytest.raises(TraceError, match=r"it reads 64 values in torch\.float32, but the target"):
        feature_spec(dataclasses.replace(shape, hidden_size=32), (7,), loaded, "float32")
    with pytest.raises(TraceError):
        check_reads_layers(loaded)
