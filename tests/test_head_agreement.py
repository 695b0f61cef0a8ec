"""The target's head on the recorded last layer: it reproduces what the target said, or not."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.target_tables import FINAL_NORM, SharedTables, TargetTables
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.calibration.traces.trace_info import head_agreement
from draftquant.quantize.stored.stored_tables import HEAD
from recorded import record_traces
from tied_pair import NUM_LAYERS, prompt_tokens, save_target
from torch import Tensor

PROMPTS = [
    Prompt(id=f"p{i}", category="a", token_ids=ids) for i, ids in enumerate(prompt_tokens(4, 9))
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("head") / "target")


def recorded(target: Path, out: Path, last_layer: int) -> TraceFolder:
    layers = (0, 1, last_layer)
    return record_traces(
        target, PROMPTS, out, max_new_tokens=40, aux_layer_ids=layers, table_ids=()
    )


@pytest.fixture(scope="module")
def traces(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    return recorded(target, tmp_path_factory.mktemp("last") / "traces", NUM_LAYERS - 1)


def test_the_head_reproduces_what_was_recorded(target: Path, traces: TraceFolder) -> None:
    assert head_agreement(traces, traces.tables()) == 1.0
    assert head_agreement(traces, TargetTables.find(target).shared()) == 1.0


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda f: f.roll(1, 0), lambda f: f.flip(0)],
    ids=["zero", "one late", "reversed"],
)
def test_other_features_do_not(
    change: Callable[[Tensor], Tensor], traces: TraceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TraceFolder.load

    def changed(self: TraceFolder, entry: object) -> PromptTrace:
        trace = load(self, entry)  # type: ignore[arg-type]
        return dataclasses.replace(trace, features=change(trace.features))

    monkeypatch.setattr(TraceFolder, "load", changed)
    agreement = head_agreement(traces, traces.tables())
    assert agreement is not None
    assert agreement < 0.5


def test_another_targets_head_does_not(traces: TraceFolder, tmp_path: Path) -> None:
    other = TargetTables.find(save_target(tmp_path / "other", seed=1)).shared()
    agreement = head_agreement(traces, other)
    assert agreement is not None
    assert agreement < 0.5


def test_norms_of_one_plus_weight_are_tried(traces: TraceFolder) -> None:
    tables = traces.tables()
    gemma = SharedTables({HEAD: lambda: tables[HEAD], FINAL_NORM: lambda: tables[FINAL_NORM] - 1})
    assert head_agreement(traces, gemma) == 1.0


def test_nothing_is_said_where_something_is_not_at_hand(
    target: Path, traces: TraceFolder, tmp_path: Path
) -> None:
    before_last = recorded(target, tmp_path / "before", NUM_LAYERS - 2)
    assert head_agreement(before_last, before_last.tables()) is None
    tables = traces.tables()
    assert head_agreement(traces, SharedTables({HEAD: lambda: tables[HEAD]})) is None
    assert head_agreement(traces, SharedTables({})) is None
