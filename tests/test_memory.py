"""The memory of a replay: estimated from headers, printed, and refused where it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.passes import draft_inputs as batches
from draftquant.calibration.passes import memory
from draftquant.calibration.passes.memory import MemoryEstimate, estimate_replay
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import DeviceError
from draftquant.scripts.cli import main
from said_traces import write_said

PAIRS = Path(__file__).parent / "pairs"
PAIR = PAIRS / "eagle3-llama"
CPU = torch.device("cpu")
WIDTH, VOCAB = 256, 1024


def traces_of(out: Path) -> TraceFolder:
    """Of a target like that of the pairs."""
    return write_said(out, prompts=6, vocab=VOCAB, hidden=WIDTH, layers=(0, 1, 2))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceFolder:
    return traces_of(tmp_path_factory.mktemp("memory") / "traces")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("memory") / "int4"
    command = ["quantize", str(PAIR / "draft"), "--recipe", "mi325x-w4a8", "--backend", "torch"]
    assert main([*command, "--out", str(out)]) == 0
    return out


def estimate(folders: list[Path], traces: TraceFolder, **options: Any) -> MemoryEstimate:
    asked: dict[str, Any] = {
        "dtype": torch.float32, "device": CPU, "num_draft_tokens": 3, "batch_size": None,
    }  # fmt: skip
    return estimate_replay(folders, traces, **asked | options)


def held_bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values())


def test_weights_are_counted_to_the_byte(traces: TraceFolder, int4: Path) -> None:
    dtype = torch.bfloat16
    found = estimate([PAIR / "draft", int4, PAIR / "draft"], traces, dtype=dtype)
    first = load_draft(PAIR / "draft", dtype=dtype, compact=True)
    second = load_draft(int4, dtype=dtype, compact=True, like=first)
    new = {n: w for n, w in second.weights.items() if w is not first.weights[n]}
    assert len(new) == 7
    one, other, again = found.drafts
    assert (one.name, one.own, one.common) == ("draft", held_bytes(dict(first.weights)), 0)
    assert (other.name, other.own) == ("int4", held_bytes(new))
    assert other.own + other.common == held_bytes(dict(second.weights))
    assert (again.own, again.common) == (0, one.own)
    assert found.total == one.own + other.own + max(found.reading, found.passes)


def test_batches_shrink_until_they_fit(
    traces: TraceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = estimate([PAIR / "draft"], traces)
    assert most.max_tokens == batches.MAX_TOKENS
    assert most.fits
    monkeypatch.setattr(memory, "BLOCK_BYTES", 1)
    single = estimate([PAIR / "draft"], traces, batch_size=1)
    monkeypatch.setattr(memory, "available_bytes", lambda _: single.total)
    less = estimate([PAIR / "draft"], traces)
    assert less.fits
    assert less.max_tokens < most.max_tokens
    assert not estimate([PAIR / "draft"], traces, batch_size=6).fits  # as it was asked for


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    traces: TraceFolder,
    int4: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = ["gate", str(PAIR / "draft"), str(int4), "--traces", str(traces.folder)]
    for options, what in (
        (("--device", "cuda:7"), "--device: there is no cuda:7"),
        (("--device", "gpu"), "--device: expected auto, cpu, cuda or cuda:I, got 'gpu'"),
        (("--batch-size", "0"), "--batch-size: expected at least 1, got 0"),
    ):
        assert main([*gate, *options]) == 2
        assert what in capsys.readouterr().err
    monkeypatch.setattr("draftquant.quantize.stored.loading.load_draft", None)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1000)
    found = estimate([PAIR / "draft", int4], traces)
    with pytest.raises(DeviceError) as caught:
        found.check()
    said = str(caught.value)
    assert said.startswith("--device cpu: replay needs 0.")
    assert "0.00 GB are available" in said
    assert "weights draft 0.00 GB, int4 0.00 GB beside 0.00 GB of the first's" in said
    assert "fix: use --dtype bfloat16 or --batch-size 1" in said
    assert main(gate) == 2
    assert "replay needs 0." in capsys.readouterr().err
    monkeypatch.setattr(memory, "available_bytes", lambda _: None)
    unknown = estimate([PAIR / "draft", int4], traces)
    unknown.check()
    assert "available" not in unknown.line()


def test_tables_that_a_draft_lacks_are_the_targets(tmp_path: Path) -> None:
    found = estimate([PAIRS / "dflash" / "draft"], traces_of(tmp_path / "t"), num_draft_tokens=None)
    assert found.tables == 2 * VOCAB * WIDTH * 2
    assert "tables of the target 0.00 GB" in found.line()
