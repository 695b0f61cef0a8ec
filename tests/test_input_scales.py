"""Static activation scales are taken along the whole chain, shared by fused linears."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from draftquant.calibration.linear_inputs.static_scales import (
    calibrated_scales,
    measure_absmax,
    run_over_traces,
    stored_scale,
)
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.making.preparing import balanced_norms
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import ActivationFormat, Algorithm, load_recipe
from draftquant.recipes.errors import CalibrationError, ForwardError, TraceError
from safetensors.torch import load_file, save_file
from tied_pair import HIDDEN, save_draft, tied
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."


@pytest.fixture(scope="module")
def folder() -> Path:
    return tied()


@pytest.fixture
def draft(folder: Path) -> LoadedDraft:
    return load_draft(folder / "draft")


@pytest.fixture
def traces(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def test_every_linear_has_a_scale_and_fused_ones_share_it(
    draft: LoadedDraft, traces: TraceFolder
) -> None:
    """NVFP4 stores that of its groups: six, the largest FP4, times 448, the largest FP8 scale."""
    largest = measure_absmax(DraftRun(draft, traces, 3))
    assert sorted(largest) == sorted(draft.linears)
    assert len({largest[ATTENTION + name] for name in ("q_proj", "k_proj", "v_proj")}) == 1
    assert largest[MLP + "gate_proj"] == largest[MLP + "up_proj"]
    assert len(set(largest.values())) == 4
    fp8 = ActivationFormat(dtype="fp8_e4m3", granularity="tensor", dynamic=False)
    nvfp4 = ActivationFormat(dtype="nvfp4", granularity="group", dynamic=True)
    for absmax in largest.values():
        for form, most in ((fp8, 448), (nvfp4, 2688)):
            scale = stored_scale(absmax, form)
            assert absmax / most <= scale < 2 * absmax / most
            assert math.frexp(scale)[0] == 0.5  # a power of two
    assert stored_scale(0.0, fp8) == 1


def test_absmax_by_an_observer_of_ones_own(draft: LoadedDraft, traces: TraceFolder) -> None:
    """K = 1 is one ordinary pass over each sequence: checked with plain causal attention."""
    seen: dict[str, float] = {}

    def observe(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[name] = max(seen.get(name, 0.0), float(x.abs().max()))
        return x

    def attend(
        _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )

    forward = draft.family.forward(draft.geometry, draft.weights, observe)
    for trace in traces:
        rows = trace.num_tokens - 2
        hidden = forward.fuse(trace.features[None, :rows])
        forward.step(trace.token_ids[None, 1 : rows + 1], hidden, torch.arange(rows), attend)
    measured = measure_absmax(DraftRun(draft, traces, 1))
    for name, absmax in measured.items():
        assert absmax == pytest.approx(seen[name], rel=1e-5)  # float32, other order of sums


def test_no_data_or_broken_data(
    folder: Path, tmp_path: Path, draft: LoadedDraft, traces: TraceFolder
) -> None:
    with pytest.raises(CalibrationError, match="num_draft_tokens: expected at least 1, got 0"):
        measure_absmax(DraftRun(draft, traces, 0))
    with pytest.raises(CalibrationError, match="do not reach this linear: no continuation is"):
        measure_absmax(DraftRun(draft, traces, 40))
    broken = load_draft(save_draft(tmp_path / "draft", folder / "target"))
    broken.weights["layers.0.mlp.up_proj.weight"][0, 0] = torch.nan  # no folder with it is loaded
    with pytest.raises(ForwardError, match="NaN or infinite"):
        measure_absmax(DraftRun(broken, traces, 2))
    other = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    shifted = load_draft(save_draft(tmp_path / "ids", folder / "target", eagle_config=other))
    with pytest.raises(TraceError, match="cannot use them"):
        measure_absmax(DraftRun(shifted, traces, 2))


def test_scales_of_a_balanced_draft_are_those_of_its_own_inputs(
    folder: Path, traces: TraceFolder, tmp_path: Path
) -> None:
    """Halves 64 apart: the embedding half reaches q, k and v divided by 64."""
    tensors = load_file(folder / "draft" / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"][:, :HIDDEN] /= 64
    tensors["midlayer.input_layernorm.weight"] *= 64  # large inputs, which one scale must not cover
    shutil.copytree(folder / "draft", tmp_path / "draft")
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    recipe = dataclasses.replace(
        load_recipe("blackwell-fp8"),
        algorithm=Algorithm(scale="absmax", rounding="nearest", balance_concat="auto"),
    )
    plan = make_plan(recipe, read_draft(Checkpoint.open(tmp_path / "draft")))
    draft = load_draft(tmp_path / "draft")
    (exponent,) = balanced_norms(plan).values()
    assert exponent >= 4
    halves = [0.0, 0.0]

    def look(name: str, x: Tensor) -> Tensor:
        if name == ATTENTION + "q_proj":
            for i, half in enumerate(x.split(HIDDEN, dim=-1)):
                halves[i] = max(halves[i], float(half.abs().max()))
        return x

    forward = draft.family.forward(draft.geometry, draft.weights, look)
    run_over_traces(forward, DraftRun(draft, traces, 3))
    scales = calibrated_scales(plan, DraftRun(draft, traces, 3)).input_scales
    wanted = max(halves[0] / 2**exponent, halves[1]) / 448
    assert scales["midlayer.self_attn.q_proj"] == 2.0 ** math.ceil(math.log2(wanted))
    assert wanted < 0.5 * max(halves) / 448  # the source's own inputs would give another scale
