"""GPTQ of experts: moments of the tokens routed to each, in groups, and nearest for the few."""

import json
import shutil
from dataclasses import replace
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
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.shared.mixture import is_expert
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import PlanError
from draftquant.recipes.schema import Algorithm
from draftquant.scripts.cli import main
from recorded import record_traces
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
        assert max_experts_on_disk(tmp_path) * 4 <= max(bytes_at_once, 4 * 64**2)
        if name not in found:
            assert is_expert(name)
            assert statistics.too_few[name] == len(x)
            width = draft.weights[f"{name}.weight"].shape[1]
            assert len(x) < LEAST_PER_COLUMN * width
            few += 1
            continue
        exact = x.T @ x / len(x)
        assert (found[name].mean.double() - exact).abs().max() <= 1e-5 * exact.abs().max(), name
    assert_the_least_is_enough(statistics, draft, monkeypatch)
    assert 0 < few < len([name for name in draft.linears if is_expert(name)])
    assert (runs > 1) is (bytes_at_once < 1 << 30)


def assert_the_least_is_enough(
    statistics: MomentsAlongTraces, draft: LoadedDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly as many tokens as are asked for are not too few; one less is."""
    name, count = max(statistics.too_few.items(), key=lambda item: item[1])
    width = draft.weights[f"{name}.weight"].shape[1]
    assert width & (width - 1) == 0, "so that the quotient is exact"
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", count / width)
    assert name not in statistics.too_few
    monkeypatch.setattr(moments, "LEAST_PER_COLUMN", (count + 1) / width)
    assert statistics.too_few[name] == count


def max_experts_on_disk(spool: Path) -> int:
    """Elements of the experts' matrices that lie in the spool."""
    files = [path for path in spool.iterdir() if ".experts." in path.name]
    return sum((path.stat().st_size - 128) // 4 for path in files)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Path:
    """The draft by GPTQ."""
    traced = ["--traces", str(folder / "traces"), "--num-draft-tokens", str(K)]
    quantize = ["quantize", str(folder / "draft"), "--out", str(folder / "out")]
    assert main([*quantize, "--recipe", "int4-channel-gptq", *traced]) == 0
    return folder / "out"


def test_experts_that_few_reach_are_nearest_and_named(
    folder: Path, rounded: Path, tmp_path: Path
) -> None:
    record = json.loads((rounded / "draftquant.json").read_text(encoding="utf-8"))
    few = record["few_inputs"]
    assert few
    assert all(".experts." in name for name in few)
    assert main(["verify", str(rounded), "--against", str(folder / "draft")]) == 0
    plain = tmp_path / "plain"
    same = ["quantize", str(folder / "draft"), "--out", str(plain), "--recipe", "int4-channel"]
    assert main([*same, "--algorithm", "mse"]) == 0
    codes, nearest = packed(rounded), packed(plain)
    assert {name for name in codes if torch.equal(codes[name], nearest[name])} == set(few)


def packed(folder: Path) -> dict[str, Tensor]:
    """Codes by module, as they are stored."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".weight_packed"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight_packed")
    }


def test_verify_holds_those_that_are_named_to_nearest(
    folder: Path, rounded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(rounded, tmp_path / "out"))
    record = json.loads((out / "draftquant.json").read_text(encoding="utf-8"))
    reached = next(
        name.removesuffix(".weight_packed")
        for name in record["tensor_digests"]
        if ".experts." in name
        and name.endswith("weight_packed")
        and name.removesuffix(".weight_packed") not in record["few_inputs"]
    )
    record["few_inputs"][reached] = 1
    (out / "draftquant.json").write_text(json.dumps(record), encoding="utf-8")
    reseal(out)
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(folder / "draft")]) == 1
    assert reached in capsys.readouterr().out


def test_learned_codes_of_experts_are_refused(folder: Path) -> None:
    draft = read_draft(Checkpoint.open(folder / "draft"))
    learned = replace(
        load_recipe("int4-channel"), algorithm=Algorithm(scale="absmax", rounding="learned")
    )
    with pytest.raises(PlanError, match="gradients and optimizer states of all experts"):
        make_plan(learned, draft)
