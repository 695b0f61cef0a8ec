"""GPTQ of experts: moments of the tokens routed to each, in groups, and nearest for the few."""

import json
from pathlib import Path

import numpy as np
import pytest
import tied_pair
import torch
from draftquant.calibration.linear_inputs import plan_inputs as moments
from draftquant.calibration.linear_inputs.plan_inputs import LEAST_PER_COLUMN, MomentsAlongTraces
from draftquant.calibration.linear_inputs.static_scales import run_over_traces
from draftquant.calibration.passes.draft_inputs import DraftRun
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.shared.mixture import is_expert
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.scripts.cli import main
from recorded import record_traces
from safetensors.torch import load_file
from tiny import read_tensors, store, write_tensors
from tiny_mtp import tiny_glm4_moe_mtp
from torch import Tensor
from verify_cases import reseal

pytestmark = pytest.mark.usefixtures("one_thread")

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
    draft = tiny_glm4_moe_mtp(
        folder / "draft",
        hidden=shape["hidden_size"],
        vocab=shape["vocab_size"],
        experts=EXPERTS,
        moe_intermediate=16,
        dtype="F32",
        config={"n_group": 1, "topk_group": 1},
    )
    tensors = read_tensors(draft)
    tensors["model.layers.3.mlp.gate.e_score_correction_bias"] = store(CORRECTION, "F32")
    write_tensors(draft, tensors)
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tokens)
        for i, tokens in enumerate(tied_pair.prompt_tokens(12, 6))
    ]
    with torch.random.fork_rng():
        record_traces(
            folder / "target",
            prompts,
            folder / "traces",
            max_new_tokens=24,
            fuse_with=load_draft(draft),
        )
    return folder


@pytest.fixture
def draft(folder: Path) -> LoadedDraft:
    return load_draft(folder / "draft")


@pytest.fixture
def traces(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def written_down(draft: LoadedDraft, traces: TraceFolder) -> dict[str, Tensor]:
    """All inputs of every linear, [n, in] float64."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> Tensor:
        seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).double())
        return x

    forward = draft.family.forward(draft.geometry, draft.weights, note)
    run_over_traces(forward, DraftRun(draft, traces, K))
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("bytes_at_once", [1 << 30, 20_000])
def test_moments_of_an_expert_are_those_of_its_tokens(
    bytes_at_once: int,
    draft: LoadedDraft,
    traces: TraceFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments, "BYTES_AT_ONCE", bytes_at_once)
    runs = 0

    def count(done: int, total: int) -> None:
        nonlocal runs
        runs += done == total

    statistics = MomentsAlongTraces(DraftRun(draft, traces, K), spool=tmp_path, on_progress=count)
    statistics.measure(draft.linears)
    inputs, few = written_down(draft, traces), 0
    order = [name.removesuffix(".weight") for name in draft.family.tensor_specs(draft.geometry)]
    for name in sorted(draft.linears, key=order.index):
        found, x = statistics.second_moments([name]), inputs.get(name, torch.empty(0, 1))
        files = [path for path in tmp_path.iterdir() if ".experts." in path.name]
        on_disk = sum(path.stat().st_size - 128 for path in files)
        assert on_disk <= max(bytes_at_once, 4 * 64**2)
        if name not in found:
            assert is_expert(name)
            assert statistics.too_few[name] == len(x)
            width = draft.weights[f"{name}.weight"].shape[1]
            assert len(x) < LEAST_PER_COLUMN * width
            few += 1
            continue
        exact = x.T @ x / len(x)
        assert (found[name].mean.double() - exact).abs().max() <= 1e-5 * exact.abs().max(), name
    # Exactly as many tokens as are asked for are not too few; one less is.
    name, count = max(statistics.too_few.items(), key=lambda item: item[1])
    width = draft.weights[f"{name}.weight"].shape[1]
    assert width & (width - 1) == 0, "so that the quotient is exact"
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", count / width)
    assert name not in statistics.too_few
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", (count + 1) / width)
    assert statistics.too_few[name] == count
    assert 0 < few < len([name for name in draft.linears if is_expert(name)])
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
