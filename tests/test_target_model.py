"""A target on one device, or spread with accelerate: the same traces, byte for byte."""

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from draftquant.api import TraceFolder
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.recording.target_model import ON_CPU, Placement, loaded_target
from draftquant.recipes.errors import TraceError
from recorded import record_traces
from safetensors.torch import load_file
from tied_pair import save_target

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(out: Path, **options: Any) -> TraceFolder:
    prompts = read_prompts(PAIR / "prompts.jsonl")[:2]
    asked = {"max_new_tokens": 4, "aux_layer_ids": (0, 1, 2), **options}
    return record_traces(PAIR / "target", prompts, out, **asked)


def test_accelerate_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TraceError, match=r"(?s)accelerate, which is not .*pip install accelerate"):
        recorded(tmp_path / "out", placement=Placement(device_map="auto"))
    assert not list(tmp_path.iterdir())


def test_a_target_too_large_for_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    target = save_target(tmp_path / "target")
    with loaded_target(target, torch.bfloat16, ON_CPU, beside=tmp_path) as model:
        monkeypatch.setattr(type(model), "to", full)
    with (
        pytest.raises(TraceError, match=r"(?s)does not fit on cpu in .* spread it with --device-"),
        loaded_target(target, torch.bfloat16, ON_CPU, beside=tmp_path),
    ):
        pass


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    torch.save(load_file(target / "model.safetensors"), target / "pytorch_model.bin")
    (target / "model.safetensors").unlink()
    with (
        pytest.raises(TraceError, match="safetensors"),
        loaded_target(target, torch.bfloat16, ON_CPU, beside=tmp_path),
    ):
        pass
