"""Traces beyond a draft's positions, and windows of its layers, are named before the replay."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from draftquant.api import TraceFolder
from draftquant.calibration.passes import draft_inputs as batches
from draftquant.calibration.passes import memory
from draftquant.calibration.passes.memory import DraftMemory, MemoryEstimate, estimate_replay
from draftquant.calibration.passes.on_traces import origin_warnings, position_warnings
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import DeviceError
from draftquant.recipes.listener import Listener
from draftquant.scripts.cli import main
from said_traces import write_said
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_llama import tiny_language_model
from tiny_mtp import tiny_step3p5_mtp
from typing_extensions import override

pytestmark = pytest.mark.usefixtures("one_thread")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
WINDOWS = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2, "sliding_window": 7}


class Heard(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    @override
    def warning(self, text: str) -> None:
        self.warnings.append(text)

    @override
    def note(self, text: str) -> None:
        self.notes.append(text)


def heard(longest: int, *drafts: Path) -> Heard:
    """Of traces whose longest prompt and answer have so many tokens."""
    prompts = [SimpleNamespace(num_tokens=tokens) for tokens in (5, longest, 6)]
    traces = SimpleNamespace(manifest=SimpleNamespace(prompts=prompts))
    listener = Heard()
    listener.warnings += position_warnings(drafts, cast("TraceFolder", traces), listener)
    return listener


def limited(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A draft of 32 positions."""
    return tiny_eagle3_llama(folder, seed=seed, config={"max_position_embeddings": 32, **config})


def test_traces_within_the_limit_need_no_word(tmp_path: Path) -> None:
    found = heard(32, limited(tmp_path / "draft"))
    assert found.warnings == found.notes == []
    assert "reach 33 positions" in heard(33, tmp_path / "draft").warnings[0]


def test_tables_of_another_target_and_text_behind_its_end(tmp_path: Path) -> None:
    other = limited(tmp_path / "other")
    for recorded in (None, "0" * 64):
        target = SimpleNamespace(name="recorded", config_sha256=recorded)
        traces: Any = SimpleNamespace(manifest=SimpleNamespace(target=target, ignore_eos=True))
        assert len(origin_warnings(other, traces)) == 2


def test_one_warning_is_said_of_all_drafts_that_it_is_true_of(tmp_path: Path) -> None:
    other = limited(tmp_path / "f", max_position_embeddings=40)
    plain, longer = heard(1000, *[limited(tmp_path / name) for name in "abcde"], other).warnings
    assert "1,000 positions, and max_position_embeddings of a, b, c and 2 more is 32:" in plain
    assert "unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set" in plain
    assert "of f is 40" in longer


def test_engines_that_serve_fewer_positions_are_named(tmp_path: Path) -> None:
    scaled = limited(tmp_path / "yarn", rope_scaling=YARN)
    whole = tiny_language_model(tmp_path / "whole", config={"max_position_embeddings": 32})
    said = "vLLM serves 32 positions of the target too and SGLang"
    assert all(said in heard(33, draft).warnings[0] for draft in (scaled, whole))
    unsaid = limited(tmp_path / "unsaid", rope_scaling=YARN, max_position_embeddings=None)
    assert heard(33, unsaid).warnings == []
    unlike = limited(tmp_path / "unlike", rope_scaling=YARN | {"rope_type": "linear"})
    assert "vLLM" not in heard(33, unlike).warnings[0]
    twice = limited(tmp_path / "linear", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert heard(64, twice).warnings == []
    assert heard(65, twice).warnings


def test_windows_are_notes(tmp_path: Path) -> None:
    block = tiny_dflash(tmp_path / "block", config=WINDOWS)
    assert heard(7, block).notes == []
    (note,) = heard(1000, block).notes
    window = "3 of 5 layers of block see the last 7 positions of up to 1,000 in the traces"
    assert note == f"{window}, in replay as in engines"
    (note,) = heard(1000, tiny_step3p5_mtp(tmp_path / "step", window=4)).notes
    assert "3 of 3 layers of step see the last 4" in note


def test_gate_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = [str(limited(tmp_path / name, seed=len(name))) for name in ("bf16", "other")]
    write_said(tmp_path / "traces", prompts=12)
    report = tmp_path / "report.json"
    asked = ("--traces", str(tmp_path / "traces"), "--report", str(report), "--unrelated")
    main(["gate", *drafts, *asked])
    said = "max_position_embeddings of bf16, other is 32"
    assert " ".join("".join(capsys.readouterr()).split()).count(said) == 1
    kept = str(json.loads(report.read_text())["warnings"])
    assert (kept.count(said), kept.count("(--unrelated)")) == (1, 1)


# ---- the memory of a replay

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


def test_batches_shrink_till_they_fit(traces: TraceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    most = estimate([PAIR / "draft"], traces)
    assert (most.max_tokens, most.fits) == (batches.MAX_TOKENS, True)
    monkeypatch.setattr(memory, "BLOCK_BYTES", 1)
    single = estimate([PAIR / "draft"], traces, batch_size=1)
    monkeypatch.setattr(memory, "available_bytes", lambda _: single.total)
    less = estimate([PAIR / "draft"], traces)
    assert less.fits
    assert less.max_tokens < most.max_tokens
    assert not estimate([PAIR / "draft"], traces, batch_size=6).fits  # as it was asked for


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    traces: TraceFolder, int4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = ["gate", str(PAIR / "draft"), str(int4), "--traces", str(traces.folder)]
    for options in (("--device", "cuda:7"), ("--device", "gpu"), ("--batch-size", "0")):
        assert main([*gate, *options]) == 2
    monkeypatch.setattr("draftquant.quantize.stored.loading.load_draft", None)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1000)
    found = estimate([PAIR / "draft", int4], traces)
    with pytest.raises(DeviceError) as caught:
        found.check()
    said = str(caught.value)
    assert "0.00 GB are available" in said
    assert "weights draft 0.00 GB, int4 0.00 GB beside 0.00 GB of the first's" in said
    assert main(gate) == 2
    monkeypatch.setattr(memory, "available_bytes", lambda _: None)
    unknown = estimate([PAIR / "draft", int4], traces)
    unknown.check()
    assert "available" not in unknown.line()
    large = (DraftMemory(name="d", own=10**9, common=4 * 10**9),)
    assert "weights d 1.00 GB beside 4.00 GB" in dataclasses.replace(unknown, drafts=large).line()


def test_tables_that_a_draft_lacks_are_the_targets(tmp_path: Path) -> None:
    found = estimate([PAIRS / "dflash" / "draft"], traces_of(tmp_path / "t"), num_draft_tokens=None)
    assert found.tables == 2 * VOCAB * WIDTH * 2
    assert "tables of the target 0.00 GB" in found.line()
