"""`--fix-config` of drafts of other kinds, by what engines do with them before and after."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.engines.contract import EngineName, Verdict
from draftquant.quantize.engines.engine_check import check_checkpoint
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.lints.catalogue import config_changes, find_lints, fixed_config
from draftquant.recipes.errors import CheckpointError
from tiny import edit_json, read_tensors, store, tiny_eagle3_llama, write_tensors
from tiny_llama import tiny_language_model
from tiny_mla import tiny_eagle3_mla
from tiny_speculators import tiny_speculators_eagle3

IDS = "eagle_aux_hidden_state_layer_ids"


def _verdict(
    checkpoint: Checkpoint, engine: EngineName, arch: str, *, config: Any = None
) -> Verdict | str:
    asked = dataclasses.replace(checkpoint, config=config or checkpoint.config)
    try:
        return check_checkpoint(asked, engine=engine, arch=arch, has_side_file=False).verdict
    except CheckpointError:
        return "no draft"


def _fixed(source: Checkpoint) -> dict[str, Any]:
    """config.json as `quantize --fix-config` writes it."""
    return fixed_config(source.config, config_changes(find_lints(read_draft(source))))


@pytest.mark.parametrize("build", [tiny_eagle3_llama, tiny_eagle3_mla])
def test_a_tied_head_is_untied_by_fix_config(build: Callable[..., Path], tmp_path: Path) -> None:
    folder = build(tmp_path / "draft", pruned_vocabulary=True)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    source = Checkpoint.open(folder)
    assert _verdict(source, "sglang", "sm90") == "LOADS BUT WRONG"
    assert _verdict(source, "vllm", "sm90") == "LOADS"
    config = _fixed(source)
    assert config["tie_word_embeddings"] is False
    assert _verdict(source, "sglang", "sm90", config=config) == "LOADS"


@pytest.mark.parametrize(
    ("build", "verdict"), [(tiny_eagle3_llama, "LOADS BUT WRONG"), (tiny_eagle3_mla, "REFUSED")]
)
def test_the_targets_number_of_layers_is_corrected(
    build: Callable[..., Path], verdict: str, tmp_path: Path
) -> None:
    """Engines build as many layers as config.json says; the draft has one."""
    folder = build(tmp_path / "draft")
    edit_json(folder / "config.json", num_hidden_layers=36)
    source = Checkpoint.open(folder)
    assert _verdict(source, "sglang", "sm90") == verdict
    assert _verdict(source, "vllm", "sm90") == "LOADS BUT WRONG"
    config = _fixed(source)
    assert config["num_hidden_layers"] == 1
    assert _verdict(source, "vllm", "sm90", config=config) == "LOADS"
    assert _verdict(source, "sglang", "sm90", config=config) == "LOADS"


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (tiny_speculators_eagle3, {IDS: [2, 3, 4, 5]}),
        (tiny_eagle3_llama, {IDS: [2, 3, 4, 5], "eagle_config": {}}),
        (tiny_eagle3_mla, {IDS: [2, 3, 4, 5], "num_aux_hidden_states": 3}),
        (tiny_eagle3_llama, {"eagle_config": {}, "target_hidden_size": 0}),
    ],
)
def test_what_engines_size_fc_by_is_corrected(
    build: Callable[..., Path], config: dict[str, Any], tmp_path: Path
) -> None:
    """Four captured layers, of which config.json tells vLLM's class in no place that it reads."""
    given = {"eagle_config": {IDS: [1, 2, 3, 4]}} | config
    folder = build(tmp_path / "draft", config=given if build != tiny_speculators_eagle3 else config)
    tensors = read_tensors(folder)
    if IDS in config:
        tensors["fc.weight"] = store(np.zeros((64, 4 * 64), np.float32), "BF16")
    write_tensors(folder, tensors)
    source = Checkpoint.open(folder)
    if "target_hidden_size" in config:
        source = dataclasses.replace(source, config={**source.config, "target_hidden_size": None})
    assert _verdict(source, "vllm", "sm90") == "REFUSED"
    fixed = _fixed(source)
    assert _verdict(source, "vllm", "sm90", config=fixed) == "LOADS"
    if build == tiny_speculators_eagle3:
        assert fixed["transformer_layer_config"]["num_aux_hidden_states"] == 4
    elif build == tiny_eagle3_llama:
        assert _verdict(source, "sglang", "sm90", config=fixed) == "LOADS"


def test_a_tied_language_model_may_store_its_head(tmp_path: Path) -> None:
    folder = tiny_language_model(tmp_path / "draft")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    source = Checkpoint.open(folder)
    assert read_draft(source).row("lm_head.weight") is not None
    assert _verdict(source, "vllm", "sm90") == "LOADS"
