"""What linears read along traces: absmax for static scales, and second moments for GPTQ.

Against every input written down, in float64.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import pytest
import tied_pair
import torch
from by_recipe import draft_of
from draftquant.calibration.linear_inputs import plan_inputs as moments
from draftquant.calibration.linear_inputs import plan_inputs as second_moments
from draftquant.calibration.linear_inputs import static_scales as trace_runs
from draftquant.calibration.linear_inputs.plan_inputs import (
    BLOCK_ROW_STRIDE,
    LEAST_PER_COLUMN,
    MomentsAlongTraces,
)
from draftquant.calibration.linear_inputs.static_scales import (
    calibrated_scales,
    constant_scales,
    measure_absmax,
    run_over_traces,
    stored_scale,
)
from draftquant.calibration.passes.draft_inputs import DraftRun, first_hidden
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.drafts.passes import BlockForward
from draftquant.quantize.drafts.shared.mixture import Mixture, is_expert, routed
from draftquant.quantize.making.preparing import balanced_norms
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import ActivationFormat, Algorithm, load_recipe
from draftquant.recipes.errors import BackendError, CalibrationError, ForwardError, TraceError
from draftquant.scripts.cli import main
from mixes import DOWN, FP8_STATIC, NVFP4, mixed
from recorded import record_traces
from rounding_pairs import RoundingPair, shared_pair
from safetensors.torch import load_file, save_file
from tied_pair import HIDDEN, save_draft, tied
from tiny import read_tensors, store, write_tensors
from tiny_mtp import tiny_glm4_moe_mtp
from torch import Tensor
from verify_cases import reseal

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."


# ---- second moments


@pytest.fixture(scope="module", params=["llama", "dflash"])
def pair(request: pytest.FixtureRequest) -> RoundingPair:
    return shared_pair(request.param)


def written_down(
    pair: RoundingPair, rounding: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """All inputs of every linear, rounded and before, one below the other, [n, in] float64."""
    draft, seen = pair.loaded(), dict[str, list[Tensor]]()

    def note(name: str, x: Tensor) -> Tensor:
        both = torch.stack([rounding(x), x]).reshape(2, -1, x.shape[-1]).double()
        seen.setdefault(name, []).append(both)
        return rounding(x)

    forward = draft.family.forward(draft.geometry, draft.weights, note)
    stride = BLOCK_ROW_STRIDE if isinstance(forward, BlockForward) else 1
    run_over_traces(forward, run_of(pair), row_stride=stride)
    return {name: (*torch.cat(parts, dim=1),) for name, parts in seen.items()}  # type: ignore[misc]


def run_of(pair: RoundingPair) -> DraftRun:
    return DraftRun(pair.loaded(), pair.traces, pair.num_draft_tokens)


def coarse(x: Tensor) -> Tensor:
    """A rounding that shows: to multiples of 1/8."""
    return (x * 8).round() / 8


def test_moments_are_the_mean_over_all_inputs(
    pair: RoundingPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several products of each matrix, each of several strips."""
    monkeypatch.setattr(second_moments, "_ROWS", 16)
    monkeypatch.setattr(second_moments, "_STRIP", 12)
    run = run_of(pair)
    statistics = MomentsAlongTraces(
        run, spool=tmp_path, rounding=lambda _name, x: coarse(x), corrected=run.draft.linears
    )
    statistics.measure([*run.draft.linears, "fc", "lm_head"])
    for name, (x, before) in written_down(pair, coarse).items():
        exact = x.T @ x / len(x)
        moments = statistics.second_moments([name])[name]
        found = moments.mean.double()
        assert found.shape == (x.shape[1], x.shape[1])
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max(), name
        assert torch.equal(found, found.T)
        if name not in run.draft.linears:
            assert moments.lost is None
            continue
        exact = (before - x).T @ x / len(x)
        assert moments.lost is not None
        assert (moments.lost.double() - exact).abs().max() <= 1e-5 * exact.abs().max(), name


def test_what_does_not_fit_at_once_begins_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices of a width at a time: five make three runs, not one each after the first two."""
    draft = shared_pair("dflash").loaded()
    names = list(dict.fromkeys(second_moments._leaders(draft, list(draft.linears)).values()))[:5]
    monkeypatch.setattr(second_moments, "_columns", lambda *_: 8)
    monkeypatch.setattr(second_moments, "BYTES_AT_ONCE", 2 * 4 * 8**2)
    assert [len(group) for group in second_moments._groups(draft, names, ())] == [2, 2, 1]


def test_equal_lengths_run_together(pair: RoundingPair, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, plain = list[int](), trace_runs.first_hidden_of_batch

    def counted(draft: LoadedDraft, traces: TraceFolder, prompts: Any, forward: Any) -> Tensor:
        batches.append(len(prompts))
        return plain(draft, traces, prompts, forward)

    monkeypatch.setattr(trace_runs, "first_hidden_of_batch", counted)
    length = max(entry.num_tokens for entry in pair.traces.manifest.prompts)
    found = []
    for together in (1, 2):
        monkeypatch.setattr(trace_runs, "MAX_TOKENS", together * length)
        batches.clear()
        found.append(written_down(pair, torch.clone))
        assert set(batches) == {together}
    for name, (alone, _) in found[0].items():
        both, _ = found[1][name]
        exact = alone.T @ alone
        assert len(both) == len(alone)
        assert (both.T @ both - exact).abs().max() <= 1e-5 * exact.abs().max()


# ---- static scales


@pytest.fixture
def draft() -> LoadedDraft:
    return load_draft(tied() / "draft")


@pytest.fixture
def traces() -> TraceFolder:
    return TraceFolder.open(tied() / "traces")


def test_linears_have_scales_that_fused_ones_share(draft: LoadedDraft, traces: TraceFolder) -> None:
    """NVFP4 stores that of its groups: six, the largest FP4, times 448, the largest FP8 scale."""
    largest, seen = measure_absmax(DraftRun(draft, traces, 3)), dict[str, float]()

    def look(name: str, x: Tensor) -> Tensor:
        seen[name] = max(seen.get(name, 0.0), -float(x.min()), float(x.max()))
        return x

    forward = draft.family.forward(draft.geometry, draft.weights, look)
    run_over_traces(forward, DraftRun(draft, traces, 3))
    assert largest.items() <= seen.items()
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


def test_each_linear_has_a_scale_of_its_format(draft: LoadedDraft, traces: TraceFolder) -> None:
    plan = make_plan(mixed(NVFP4, (FP8_STATIC, DOWN)), draft_of(tied() / "draft"))
    run = DraftRun(draft, traces, 3)
    largest, scales = measure_absmax(run), calibrated_scales(plan, run).input_scales
    assert len(scales) == len(plan.quantized)
    for step in plan.quantized:
        form = (FP8_STATIC if step.row.module.endswith("down_proj") else NVFP4).activations
        wanted = stored_scale(largest[step.row.canonical.removesuffix(".weight")], form)
        assert scales[step.row.module] == wanted


def test_no_data_or_broken_data(tmp_path: Path, draft: LoadedDraft, traces: TraceFolder) -> None:
    with pytest.raises(CalibrationError, match="num_draft_tokens: expected at least 1, got 0"):
        measure_absmax(DraftRun(draft, traces, 0))
    with pytest.raises(CalibrationError, match="do not reach this linear: no continuation is"):
        measure_absmax(DraftRun(draft, traces, 40))
    broken = load_draft(save_draft(tmp_path / "draft", tied() / "target"))
    broken.weights["layers.0.mlp.up_proj.weight"][0, 0] = torch.nan  # no folder with it is loaded
    with pytest.raises(ForwardError, match="NaN or infinite"):
        measure_absmax(DraftRun(broken, traces, 2))
    other = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    shifted = load_draft(save_draft(tmp_path / "ids", tied() / "target", eagle_config=other))
    with pytest.raises(TraceError, match="cannot use them"):
        measure_absmax(DraftRun(shifted, traces, 2))


def test_a_balanced_draft_has_scales_of_its_own_inputs(traces: TraceFolder, tmp_path: Path) -> None:
    """Halves 64 apart: the embedding half reaches q, k and v divided by 64."""
    tensors = load_file(tied() / "draft" / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"][:, :HIDDEN] /= 64
    tensors["midlayer.input_layernorm.weight"] *= 64  # large inputs, which one scale must not cover
    shutil.copytree(tied() / "draft", tmp_path / "draft")
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    recipe = dataclasses.replace(
        load_recipe("blackwell-fp8"),
        algorithm=Algorithm(scale="absmax", rounding="nearest", balance_concat="auto"),
    )
    plan = make_plan(recipe, draft_of(tmp_path / "draft"))
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


def test_scales_cover_all_that_fc_and_head_read(draft: LoadedDraft, traces: TraceFolder) -> None:
    """The head: of all rows at all depths, normed by hand."""
    scales = measure_absmax(DraftRun(draft, traces, 3), others=["fc", "lm_head"])
    features = max(float(trace.features.abs().max()) for trace in traces)
    assert scales["fc"] == pytest.approx(features, rel=1e-6)
    rows = []
    for trace in traces:
        passes = draft.forward.passes(
            first_hidden(draft, traces, trace)[None],
            trace.token_ids[None],
            rows=whole_rows(trace.num_tokens, 3, first_row=trace.prompt_length - 1),
            num_draft_tokens=3,
        )
        rows += [one.hidden.flatten(0, -2) for one in passes]
    hidden = torch.cat(rows).detach()
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + draft.geometry.rms_norm_eps).sqrt()
    largest = float((normed * draft.weights["norm.weight"]).abs().max())
    assert scales["lm_head"] == pytest.approx(largest, rel=1e-5)


def test_a_constant_scale_goes_to_every_quantized_linear() -> None:
    plan = make_plan(load_recipe("blackwell-fp8-mla"), draft_of(corpus.draft("eagle3-mla")))
    found = constant_scales(plan, 0.5)
    assert found.input_scales == dict.fromkeys((step.row.module for step in plan.quantized), 0.5)
    for wrong in (0.0, float("inf"), float("nan")):
        with pytest.raises(BackendError, match=r"--input-scale: expected a positive number, got"):
            constant_scales(plan, wrong)


# ---- gPTQ of experts: moments of the tokens routed to each, in groups, and nearest for the few


K = 2
EXPERTS = 4
CORRECTION = np.array([0.0, 0.0, -0.4, -10.0], dtype=np.float32)
"""Of what experts are chosen by: the third is reached by few tokens, the last by none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, an MTP layer with experts of which one is hardly ever reached, and traces."""
    folder = tmp_path_factory.mktemp("experts")
    tied_pair.save_target(folder / "target")
    shape = json.loads((folder / "target/config.json").read_text(encoding="utf-8"))
    sizes = {"hidden": shape["hidden_size"], "vocab": shape["vocab_size"], "moe_intermediate": 16}
    one_group = {"n_group": 1, "topk_group": 1}
    mixture = tiny_glm4_moe_mtp(
        folder / "draft", **sizes, experts=EXPERTS, dtype="F32", config=one_group
    )
    tensors = read_tensors(mixture)
    tensors["model.layers.3.mlp.gate.e_score_correction_bias"] = store(CORRECTION, "F32")
    write_tensors(mixture, tensors)
    prompts, draft = tied_pair.prompts_of(tied_pair.prompt_tokens(12, 6)), load_draft(mixture)
    target, traces = folder / "target", folder / "traces"
    with torch.random.fork_rng():
        record_traces(target, prompts, traces, max_new_tokens=24, fuse_with=draft)
    return folder


@pytest.fixture
def mixture(folder: Path) -> LoadedDraft:
    return load_draft(folder / "draft")


@pytest.fixture
def texts(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def inputs_seen(mixture: LoadedDraft, texts: TraceFolder) -> dict[str, Tensor]:
    """All inputs of every linear, [n, in] float64."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> Tensor:
        seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).double())
        return x

    forward = mixture.family.forward(mixture.geometry, mixture.weights, note)
    run_over_traces(forward, DraftRun(mixture, texts, K))
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("bytes_at_once", [1 << 30, 20_000])
def test_moments_of_an_expert_are_those_of_its_tokens(
    bytes_at_once: int,
    mixture: LoadedDraft,
    texts: TraceFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments, "BYTES_AT_ONCE", bytes_at_once)
    runs = 0

    def count(done: int, total: int) -> None:
        nonlocal runs
        runs += done == total

    statistics = MomentsAlongTraces(DraftRun(mixture, texts, K), spool=tmp_path, on_progress=count)
    statistics.measure(mixture.linears)
    inputs, few = inputs_seen(mixture, texts), 0
    order = [name.removesuffix(".weight") for name in mixture.family.tensor_specs(mixture.geometry)]
    for name in sorted(mixture.linears, key=order.index):
        found, x = statistics.second_moments([name]), inputs.get(name, torch.empty(0, 1))
        files = [path for path in tmp_path.iterdir() if ".experts." in path.name]
        assert sum(path.stat().st_size - 128 for path in files) <= max(bytes_at_once, 4 * 64**2)
        if name not in found:
            assert is_expert(name)
            assert statistics.too_few[name] == len(x)
            width = mixture.weights[f"{name}.weight"].shape[1]
            assert len(x) < LEAST_PER_COLUMN * width
            few += 1
            continue
        exact = x.T @ x / len(x)
        assert (found[name].mean.double() - exact).abs().max() <= 1e-5 * exact.abs().max(), name
    # Exactly as many tokens as are asked for are not too few; one less is.
    name, count = max(statistics.too_few.items(), key=lambda item: item[1])
    width = mixture.weights[f"{name}.weight"].shape[1]
    assert width & (width - 1) == 0, "so that the quotient is exact"
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", count / width)
    assert name not in statistics.too_few
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", (count + 1) / width)
    assert statistics.too_few[name] == count
    assert 0 < few < len([name for name in mixture.linears if is_expert(name)])
    assert (runs > 1) is (bytes_at_once < 1 << 30)


@pytest.mark.slow
def test_experts_that_few_reach_are_nearest_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = ["--traces", str(folder / "traces"), "--num-draft-tokens", str(K)]
    quantize = ["quantize", str(folder / "draft"), "--recipe", "int4-channel", "--algorithm"]
    out, plain = tmp_path / "gptq", tmp_path / "mse"
    assert main([*quantize, "gptq", "--out", str(out), *traced]) == 0
    assert main([*quantize, "mse", "--out", str(plain)]) == 0
    record = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    few = record["few_inputs"]
    assert few
    assert all(".experts." in name for name in few)
    codes, nearest = (load_file(made / "model.safetensors") for made in (out, plain))
    packed = [name for name in codes if name.endswith(".weight_packed")]
    same = {name for name in packed if torch.equal(codes[name], nearest[name])}
    assert same == {f"{name}.weight_packed" for name in few}
    # verify holds those that are named to nearest
    reached = min(name for name in packed if ".experts." in name and name not in same)
    few[reached.removesuffix(".weight_packed")] = 1
    (out / "draftquant.json").write_text(json.dumps(record), encoding="utf-8")
    reseal(out)
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(folder / "draft")]) == 1
    assert reached in capsys.readouterr().out


def test_experts_of_closed_groups_are_never_chosen() -> None:
    """Even where all scores are below zero."""
    mixture = Mixture(
        num_experts=4, per_token=2, width=1, shared_width=0, scoring="sigmoid", normalises=True,
        num_groups=2, groups_per_token=1,
    )  # fmt: skip
    router = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    experts, _ = routed(mixture, torch.ones(1, 1), router, torch.full((4,), -2.0))
    assert sorted(experts[0].tolist()) == [0, 1]
