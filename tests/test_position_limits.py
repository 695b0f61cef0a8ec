"""Traces beyond a draft's positions, and windows of its layers, are named before the replay."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from draftquant.calibration.passes.on_traces import position_warnings
from draftquant.calibration.traces.trace_folder import TraceFolder
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


def test_one_warning_is_said_of_all_drafts_that_it_is_true_of(tmp_path: Path) -> None:
    drafts = [limited(tmp_path / name) for name in "abcde"]
    other = limited(tmp_path / "f", max_position_embeddings=40)
    plain, longer = heard(1000, *drafts, other).warnings
    assert plain.startswith(
        "the traces reach 1,000 positions, and max_position_embeddings of a, b, c and 2 more is 32:"
    )
    assert "unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set" in plain
    assert "of f is 40" in longer


def test_engines_that_serve_fewer_positions_are_named(tmp_path: Path) -> None:
    scaled = limited(tmp_path / "yarn", rope_scaling=YARN)
    whole = tiny_language_model(tmp_path / "whole", config={"max_position_embeddings": 32})
    for draft in (scaled, whole):
        assert (
            "vLLM serves 32 positions of the target too and SGLang" in heard(33, draft).warnings[0]
        )
    unsaid = limited(tmp_path / "unsaid", rope_scaling=YARN, max_position_embeddings=None)
    assert heard(33, unsaid).warnings == []
    twice = limited(tmp_path / "linear", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert heard(64, twice).warnings == []
    assert heard(65, twice).warnings


def test_windows_are_notes(tmp_path: Path) -> None:
    block = tiny_dflash(tmp_path / "block", config=WINDOWS)
    assert heard(7, block).notes == []
    assert heard(1000, block).notes == [
        "3 of 5 layers of block see the last 7 positions of up to 1,000 in the traces, in replay as"
        " in engines"
    ]
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
    assert kept.count(said) == 1
    assert "(--unrelated)" in kept
