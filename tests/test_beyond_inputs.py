"""What fc and the head read along traces: static scales, moments, and traces that hold neither."""

from pathlib import Path

import pytest
import torch
from draftquant.calibration.linear_inputs.plan_inputs import MomentsAlongTraces
from draftquant.calibration.linear_inputs.static_scales import calibrated_scales, measure_absmax
from draftquant.calibration.passes.draft_inputs import DraftRun, check_trace_fits, first_hidden
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.quantize.verify import verify
from draftquant.recipes.errors import CalibrationError, TraceError
from draftquant.scripts.cli import main
from heads import beyond
from mixes import FP8, FP8_STATIC
from recorded import record_traces
from safetensors.torch import load_file
from tied_pair import prompt_tokens, tied

pytestmark = pytest.mark.usefixtures("one_thread")

K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, and traces of both kinds."""
    folder = tmp_path_factory.mktemp("beyond")
    for name in ("target", "draft", "traces"):
        (folder / name).symlink_to(tied() / name)
    prompts = [
        Prompt(id=f"p{i}", category="a", token_ids=tokens)
        for i, tokens in enumerate(prompt_tokens(4, 8))
    ]
    draft = load_draft(folder / "draft")
    record_traces(folder / "target", prompts, folder / "fused", max_new_tokens=16, fuse_with=draft)
    return folder


@pytest.fixture
def draft(folder: Path) -> LoadedDraft:
    return load_draft(folder / "draft")


@pytest.fixture
def traces(folder: Path) -> TraceFolder:
    return TraceFolder.open(folder / "traces")


def head_inputs(draft: LoadedDraft, traces: TraceFolder) -> torch.Tensor:
    """What the head reads of all rows at all depths, normed by hand, [n, W]."""
    rows = []
    for trace in traces:
        passes = draft.forward.passes(
            first_hidden(draft, traces, trace)[None],
            trace.token_ids[None],
            rows=whole_rows(trace.num_tokens, K, first_row=trace.prompt_length - 1),
            num_draft_tokens=K,
        )
        rows += [one.hidden.flatten(0, -2) for one in passes]
    hidden = torch.cat(rows).detach()
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + draft.geometry.rms_norm_eps).sqrt()
    return normed * draft.weights["norm.weight"]


def test_scales_cover_all_that_fc_and_the_head_read(
    draft: LoadedDraft, traces: TraceFolder
) -> None:
    scales = measure_absmax(DraftRun(draft, traces, K), others=["fc", "lm_head"])
    features = max(float(trace.features.abs().max()) for trace in traces)
    assert scales["fc"] == pytest.approx(features, rel=1e-6)
    largest = float(head_inputs(draft, traces).abs().max())
    assert scales["lm_head"] == pytest.approx(largest, rel=1e-5)
    assert not {"fc", "lm_head"} & set(measure_absmax(DraftRun(draft, traces, K)))


def test_moments_of_the_head(draft: LoadedDraft, traces: TraceFolder, tmp_path: Path) -> None:
    statistics = MomentsAlongTraces(DraftRun(draft, traces, K), spool=tmp_path)
    statistics.measure(["lm_head"])
    x = head_inputs(draft, traces)
    found = statistics.second_moments(["lm_head"])["lm_head"].mean
    torch.testing.assert_close(found, x.T @ x / len(x), rtol=1e-4, atol=1e-5)


def test_a_quantized_fc_reads_no_fused_features(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plan = make_plan(beyond("fc", FP8, fusion=FP8), read_draft(Checkpoint.open(folder / "draft")))
    quantize_draft(plan, out, source=DraftSource(folder=folder / "draft"))
    quantized, fused = load_draft(out), TraceFolder.open(folder / "fused")
    assert quantized.fusion_sha256 != load_draft(folder / "draft").fusion_sha256
    with pytest.raises(TraceError, match="its fc is quantized") as caught:
        check_trace_fits(quantized, fused)
    assert "record traces without --fused" in str(caught.value.fix)
    check_trace_fits(quantized, TraceFolder.open(folder / "traces"))
    command = ["gate", str(folder / "draft"), str(out), "--traces", str(folder / "fused")]
    assert main([*command, "--policy", "screening"]) == 2
    assert "its fc is quantized" in " ".join(capsys.readouterr().err.split())


def test_a_static_recipe_stores_the_scales_of_both(folder: Path, tmp_path: Path) -> None:
    recipe = beyond("static", FP8_STATIC, head=FP8_STATIC, fusion=FP8_STATIC, layout="modelopt")
    draft = load_draft(folder / "draft")
    plan = make_plan(recipe, read_draft(Checkpoint.open(folder / "draft")))
    traces = TraceFolder.open(folder / "traces")
    static = calibrated_scales(plan, DraftRun(draft, traces, K))
    out = tmp_path / "out"
    quantize_draft(plan, out, source=DraftSource(folder=folder / "draft"), measured=static)
    tensors = load_file(out / "model.safetensors")
    for module in ("fc", "lm_head"):
        assert float(tensors[f"{module}.input_scale"]) == static.input_scales[module]
    assert verify(out, folder / "draft").ok
    fused = TraceFolder.open(folder / "fused")
    with pytest.raises(CalibrationError, match="hold the outputs of this linear") as caught:
        calibrated_scales(plan, DraftRun(draft, fused, K))
    assert "record traces without --fused, or keep fc" in str(caught.value.fix)
