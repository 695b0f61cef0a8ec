"""Stages: linears take their turns in the order of the draft where an algorithm needs their inputs.

The statistics here are handed over by the test; that calibration measures them rightly is tested
with it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from draftquant.quantize.algorithms import InputMoments, Need
from draftquant.quantize.backends.backend import TorchBackend
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import GptqFactors
from draftquant.quantize.making.execute import execute
from draftquant.quantize.numerics.quantized_weight import QuantizedWeight
from draftquant.quantize.planning.outputs import opened
from draftquant.quantize.planning.quantization_plan import Measured, make_plan
from draftquant.recipes import WeightFormat, load_recipe
from draftquant.recipes.errors import BackendError
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_mla import tiny_eagle3_mla
from torch import Tensor

ATTENTION = ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"]
MLP = [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
LLAMA = [ATTENTION, ["self_attn.o_proj"], *MLP]
MLA = [
    ["self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"],
    ["self_attn.q_b_proj"],
    ["self_attn.o_proj"],
    *MLP,
]
BUILDERS = {"llama": tiny_eagle3_llama, "mla": tiny_eagle3_mla, "dflash": tiny_dflash}
ORDERS = {"llama": LLAMA, "mla": MLA, "dflash": LLAMA}


def draft_of(folder: Path, family: str) -> Draft:
    return read_draft(Checkpoint.open(BUILDERS[family](folder)))


@pytest.mark.parametrize("family", BUILDERS)
def test_stages_follow_the_draft(family: str, tmp_path: Path) -> None:
    draft = draft_of(tmp_path / "draft", family)
    plan = make_plan(load_recipe("fp8-ptpc"), draft)
    rest, *linears = plan.stages()
    assert all(step.action != "quantize" for step in rest)
    wanted = [
        sorted(f"layers.{layer}.{name}.weight" for name in stage)
        for layer in range(draft.geometry.num_layers)
        for stage in ORDERS[family]
    ]
    assert [sorted(step.row.canonical for step in stage) for stage in linears] == wanted
    assert len(rest) + sum(map(len, linears)) == len(plan.steps)


class Recorded:
    """`Statistics` that writes down what it is asked: moments say how often they were asked for."""

    def __init__(self) -> None:
        self.measured: list[list[str]] = []
        self.asked: list[list[str]] = []

    def measure(self, modules: Sequence[str]) -> None:
        self.measured.append(sorted(modules))

    too_few: Mapping[str, int] = {}
    factors = GptqFactors(dtype="float32")

    def second_moments(self, modules: Sequence[str]) -> Mapping[str, InputMoments]:
        assert set(modules) <= set(self.measured[-1]), "asked for before it was measured"
        self.asked.append(sorted(modules))
        return dict.fromkeys(modules, InputMoments(torch.full((1, 1), float(len(self.asked)))))


class NeedsMoments(TorchBackend):
    """The codes of `TorchBackend`; what it is given is written down."""

    needs: Need = "second_moments"

    def __init__(self) -> None:
        super().__init__()
        self.needs = "second_moments"
        self.given: list[float] = []

    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        absmax: Tensor | None = None,
        moments: InputMoments | None = None,
    ) -> QuantizedWeight:
        assert moments is not None
        self.given.append(float(moments.mean))
        return super().quantize(weight, weights, absmax, None)


@pytest.mark.parametrize("family", BUILDERS)
def test_all_is_measured_once_and_used_stage_by_stage(family: str, tmp_path: Path) -> None:
    draft = draft_of(tmp_path / "draft", family)
    plan = make_plan(dataclasses.replace(load_recipe("int4-channel"), backend="torch"), draft)
    statistics, backend, done = Recorded(), NeedsMoments(), []
    (tmp_path / "out").mkdir()
    kept = [step for step in plan.steps if step.action != "quantize"]
    with opened(plan.draft.checkpoint, tmp_path / "out", plan.steps, kept=kept) as run:
        execute(
            plan,
            run,
            backend,
            measured=Measured(statistics=statistics),
            exponents={},
            allow_zero_rows=False,
            on_progress=done.append,
        )
    stages = [[s.row.canonical.removesuffix(".weight") for s in x] for x in plan.stages()[1:]]
    assert statistics.measured == [sorted(name for stage in stages for name in stage)]
    assert [names for names in statistics.asked if names] == [sorted(names) for names in stages]
    assert sorted(step.row.tensor.name for step in done) == sorted(
        step.row.tensor.name for step in plan.steps
    )
    calls = [2.0 + place for place, stage in enumerate(stages) for _ in stage]
    assert backend.given == calls  # moments of its own stage, not of another one


def test_without_statistics_nothing_is_guessed(tmp_path: Path) -> None:
    plan = make_plan(load_recipe("int4-channel"), draft_of(tmp_path / "draft", "llama"))
    (tmp_path / "out").mkdir()
    with (
        opened(plan.draft.checkpoint, tmp_path / "out", plan.steps, kept=()) as run,
        pytest.raises(BackendError, match="must know the inputs of the linears") as caught,
    ):
        execute(
            plan,
            run,
            NeedsMoments(),
            measured=Measured(),
            exponents={},
            allow_zero_rows=False,
            on_progress=lambda _step: None,
        )
    assert "--traces" in caught.value.fix
