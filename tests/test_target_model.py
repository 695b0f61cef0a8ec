"""A target on one device, or spread with accelerate: the same traces, byte for byte."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.recording.target_model import (
    ON_CPU,
    Placement,
    input_device,
    loaded_target,
)
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import TraceError
from recorded import record_traces
from tied_pair import save_target
from torch import nn
from vendors import needs

PAIRS = Path(__file__).parent / "pairs"
LAYERS = {"eagle3-llama": (0, 1, 2), "eagle3-mla": (1, 2, 3), "dflash": (0, 1, 2)}

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(pair: str, out: Path, **options: Any) -> TraceFolder:
    return record_traces(
        PAIRS / pair / "target",
        read_prompts(PAIRS / pair / "prompts.jsonl")[:3],
        out,
        max_new_tokens=8,
        aux_layer_ids=LAYERS[pair],
        **options,
    )


@pytest.mark.some(1)
@needs("accelerate")
@pytest.mark.parametrize("pair", LAYERS)
def test_a_spread_target_records_the_same_bytes(pair: str, tmp_path: Path) -> None:
    """All on the CPU, and half of it on the disk, from where every step fetches it."""
    expected = recorded(pair, tmp_path / "whole")
    for name, nbytes in (("cpu", 10**12), ("disk", 8_000_000)):
        placement = Placement(device_map="auto", max_memory={"cpu": nbytes})
        found = recorded(pair, tmp_path / name, placement=placement)
        assert found.sha256 == expected.sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu", "disk", "whole"]


@needs("accelerate")
def test_half_of_it_is_really_on_the_disk(tmp_path: Path) -> None:
    placement = Placement(device_map="auto", max_memory={"cpu": 8_000_000})
    target = PAIRS / "eagle3-llama" / "target"
    with loaded_target(target, torch.float32, placement, beside=tmp_path) as model:
        assert set(model.hf_device_map.values()) == {"cpu", "disk"}
        assert model.model.layers[3].mlp.up_proj.weight.is_meta
        assert input_device(model) == torch.device("cpu")
        assert [path.name.startswith(".offloaded-") for path in tmp_path.iterdir()] == [True]
    assert not list(tmp_path.iterdir())


def test_without_accelerate_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TraceError, match="accelerate, which is not installed") as caught:
        recorded("eagle3-llama", tmp_path / "out", placement=Placement(device_map="auto"))
    assert "pip install accelerate" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_target_that_does_not_fit_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    target = save_target(tmp_path / "target")
    with loaded_target(target, torch.bfloat16, ON_CPU, beside=tmp_path) as model:
        monkeypatch.setattr(type(model), "to", full)
    with (
        pytest.raises(TraceError, match="does not fit on cpu in bfloat16") as caught,
        loaded_target(target, torch.bfloat16, ON_CPU, beside=tmp_path),
    ):
        pass
    assert "spread it with --device-map auto, or record in a narrower --dtype" in str(caught.value)


def test_fused_features_are_those_of_a_compact_draft(tmp_path: Path) -> None:
    folder = PAIRS / "eagle3-llama" / "draft"
    wide, compact = (
        recorded("eagle3-llama", tmp_path / str(how), fuse_with=load_draft(folder, compact=how))
        for how in (False, True)
    )
    assert wide.sha256 == compact.sha256
    with pytest.raises(TraceError, match=r"its fc reads 768 values in torch.bfloat16") as caught:
        recorded(
            "eagle3-llama", tmp_path / "other", fuse_with=load_draft(folder, dtype=torch.bfloat16)
        )
    assert "load the draft in the dtype of the recording" in str(caught.value)
