"""What FP4 weights would gain by other inputs: the formats by definition, and the benchmark."""

import json
from pathlib import Path

import pytest
import torch
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.scripts.cli import main as draftquant
from draftquant.scripts.dev import bench_engine_changes
from draftquant.scripts.dev.bench_engine_changes import engines, main
from draftquant.scripts.dev.served_inputs import FORMATS, READERS, Engine, ServedInputs
from draftquant.validate.counting.trace_replay import replay_drafts
from torch import Tensor

pytestmark = pytest.mark.slow

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
ONE = torch.tensor(1.0)


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def errors(name: str, x: Tensor, size: int) -> Tensor:
    wrong = FORMATS[name](x, torch.tensor(64.0)) - x
    return wrong.unflatten(-1, (-1, size)).square().sum(-1)


@pytest.mark.parametrize(
    ("name", "x", "wanted"),
    [
        ("BF16", block(1.2345), block(1.2345)),
        ("NVFP4", block(4, 3), block(4.125, 2.75)),  # under 0.6875: 6 and 4
        ("NVFP4, four over six", block(4, 3), block(4, 3)),  # under 1
        ("NVFP4, four over six", block(6, 3), block(6, 3)),
        ("NVFP4, global scale per token", block(6 * 448, 3 * 448), block(6 * 448, 3 * 448)),
        ("MXFP4", block(7.5, 1), block(8, 1)),  # under 2
        ("MXFP4, scales rounded down", block(7.5, 1), block(6, 1)),
        ("MXFP4", block(6.5, 1.5), block(6, 1.5)),
        ("MXFP4, scales rounded up", block(6.5, 1.5), block(6, 2)),
        ("MXFP4, best of two scales", block(7.5, 1), block(8, 1)),
        ("MXFP4, best of two scales", block(7.5, *[1.5] * 31), block(6, *[1.5] * 31)),
        ("MXFP8", block(500, 1), block(512, 1)),  # under 2, where E4M3 has 240 and 256
        ("FP8", block(448, 27), block(448, 28)),
    ],
)
def test_formats_are_what_they_are_called(name: str, x: Tensor, wanted: Tensor) -> None:
    assert torch.equal(FORMATS[name](x, ONE), wanted)


def test_smaller_groups_have_scales_of_their_own() -> None:
    x = torch.cat([torch.full((16,), 6.0), torch.full((16,), 0.75)])
    assert torch.equal(FORMATS["MXFP4, groups of 16"](x, None), x)
    assert not torch.equal(FORMATS["MXFP4"](x, None), x)


def test_the_best_of_two_scales_errs_less_in_every_block() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    for best, usual, size in (
        ("NVFP4, four over six", "NVFP4", 16),
        ("MXFP4, best of two scales", "MXFP4", 32),
    ):
        found, others = errors(best, x, size), errors(usual, x, size)
        assert bool((found <= others).all())
        assert bool((found < others).any())
    for name in FORMATS:
        assert not FORMATS[name](x, ONE)[0].any(), name


def test_only_what_reads_an_input_is_rounded_otherwise() -> None:
    engine = Engine(name="", inputs="MXFP4", but={"down": "BF16"})
    inputs = ServedInputs(engine, {"layers.0.mlp.down_proj": None, "layers.0.mlp.up_proj": None})
    x = block(7.5)
    assert torch.equal(inputs("layers.0.mlp.down_proj", x), x)
    assert torch.equal(inputs("fc", x), x)
    assert torch.equal(inputs("layers.0.mlp.up_proj", x), block(8))


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_todays_engine_comes_first(weights: str) -> None:
    found = engines(weights)
    assert found[0] == Engine(name=weights.upper(), inputs=weights.upper())
    assert len({one.name for one in found}) == len(found)
    assert {reads for one in found for reads in one.but} == set(READERS)


class FewTraces:
    """`PairTraces` of a few short texts, which calibrate and judge."""

    def __init__(self, _pair: Path, work: Path, _num_prompts: int) -> None:
        self.folder = work.parent / "traces"
        work.mkdir(exist_ok=True)

    def gate(self, _by: object) -> Path:
        return self.folder

    calibration = gate


def test_every_engine_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:6]), encoding="utf-8")
    pair = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "--tables")
    prompts = ("--prompts", str(tmp_path / "few.jsonl"), "--max-new-tokens", "32")
    assert draftquant(["record", *pair, *prompts, "--out", str(tmp_path / "traces")]) == 0
    monkeypatch.setattr(bench_engine_changes, "PairTraces", FewTraces)
    capsys.readouterr()
    asked = [str(tmp_path), "--pair", str(PAIR), "--weights", "nvfp4", "--engine", "NVFP4", "FP8"]
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["engine"], row["found_for"]) for row in rows] == [
        ("NVFP4", "NVFP4"),
        ("FP8", "FP8"),
        ("FP8", "NVFP4"),
        ("FP8", "BF16"),
    ]
    today, wide = rows[:2]
    assert wide["divergence"] < today["divergence"]
    assert wide["lower"] <= wide["change"] <= wide["upper"]
    traces = TraceFolder.open(tmp_path / "traces")
    draft = load_draft(tmp_path / "eagle3-llama" / "engines" / "nvfp4-nvfp4")
    (replay,) = replay_drafts([draft], traces, num_draft_tokens=3)
    assert replay.counts.mean_acceptance_length == today["acceptance_length"]
    assert main(asked[:-1]) == 0  # the folder is there
    assert "the same" in capsys.readouterr().out
