"""`estimate --forward`: times of `vllm bench forward` instead of the roofline, and bad files.

The files are written as vLLM 0.33 writes them (`benchmarks/forward/main.py:258`), figures ours.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from draftquant import api as dq
from draftquant.quantize.estimate.estimate_report import to_mapping
from draftquant.recipes.errors import EstimateError
from draftquant.scripts.cli import main

DRAFT = Path(__file__).parent / "pairs" / "eagle3-llama" / "draft"
K, CONTEXT = 3, 400


def write_run(path: Path, microseconds: float, *, drafts: bool, **changes: Any) -> Path:
    """A run of two sequences that verify K tokens, and of a prefill."""
    scope = "target_and_drafter" if drafts else "target_only"
    rank = {"timing_scope": scope, "latency_us": {"sample_spread_pct": 0.2, "median": microseconds}}
    request = {"query_len": K + 1, "num_draft_tokens": K, "chunked": False}
    lengths = changes.pop("kv_lengths", (390, 418))
    verify = {
        "case": "verify",
        "requests": [{**request, "kv_len": kv} for kv in lengths],
        "median_us": microseconds,
        "ranks": [rank],
        **changes,
    }
    prefill = {"query_len": 64, "kv_len": 64, "num_draft_tokens": 0, "chunked": False}
    cases = [verify, {"case": "pre", "requests": [prefill], "median_us": 5.0, "ranks": [rank]}]
    path.write_text(json.dumps(cases, indent=2), encoding="utf-8")
    return path


def estimated(*forward: str, gpus: tuple[str, ...] = ("h200",), **asked: Any) -> Any:
    asked = {"concurrency": 2, "context": CONTEXT, **asked}
    return dq.estimate(DRAFT, recipes=["fp8-ptpc", "int4-channel"], gpus=gpus,
                       num_draft_tokens=K, forward=forward, **asked)  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    """Figures: 8 ms of verify step, 500 µs of drafting, 300 µs of it in FP8."""
    said = {"target": (8000.0, False), "BF16": (8500.0, True), "fp8-ptpc": (8300.0, True)}
    return {
        name: f"{name}={write_run(tmp_path / f'{name}.json', us, drafts=drafts)}"
        for name, (us, drafts) in said.items()
    }


def test_measured_times_stand_in_place_of_the_roofline(runs: dict[str, str]) -> None:
    report = estimated(*runs.values())
    machine, plain, fp8, int4 = report.machines[0], *report.candidates
    assert report.verify_seconds == pytest.approx(8e-3)
    assert report.drafting_seconds(plain, machine) == pytest.approx(500e-6)
    assert report.drafting_seconds(fp8, machine) == pytest.approx(300e-6)
    assert report.break_even(fp8, machine) == pytest.approx(200e-6 / 8.5e-3)
    roofline = machine.round_seconds(int4.round, 2)
    assert report.drafting_seconds(int4, machine) == roofline
    ours = machine.round_seconds(plain.round, 2)  # a roofline is held against a roofline
    assert report.break_even(int4, machine) == pytest.approx((ours - roofline) / (ours + 8e-3))
    times = {one["name"]: one["times"][0] for one in to_mapping(report)["drafts"]}
    assert [times[name]["round_measured"] for name in ("BF16", "fp8-ptpc", "int4-channel")] == [
        True, True, False,
    ]  # fmt: skip


def test_the_command_says_what_was_measured(
    runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for each in runs.values() for word in ("--forward", each)]
    shape = ["--num-draft-tokens", "3", "--context", "400", "--concurrency", "2"]
    assert (
        main(["estimate", str(DRAFT), "--gpu", "h200", "--recipe", "fp8-ptpc", *shape, *given]) == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "/ 500 measured" in printed
    assert "/ 300 measured" in printed
    assert "a verify step of 8,000.0 µs, 400 positions per sequence on average" in printed


def test_the_target_alone_is_the_verify_step(runs: dict[str, str]) -> None:
    report = estimated(runs["target"])
    assert report.verify_seconds == pytest.approx(8e-3)
    assert report.measured.drafting("BF16") is None


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        (["BF16"], {}, "no run of the target alone"),
        (["target", "target"], {}, "target is given twice"),
        (["target"], {"gpus": ("h200", "h100")}, "expected one gpus=, on which"),
        (["target"], {"target_step_ms": 8.0}, "target_step_ms= says it too"),
        (["target"], {"concurrency": 1}, "of 1 sequences with 3 drafted tokens each, got 0 of 2"),
        (["target"], {"context": 200}, "400 positions on average, and 200 are estimated"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    given: list[str], asked: dict[str, Any], words: str, runs: dict[str, str]
) -> None:
    with pytest.raises(EstimateError, match=words):
        estimated(*(runs[name] for name in given), **asked)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lengths": (392, 416)}, "timed with other KV lengths than the target"),
        ({"median_us": 7000.0}, "took 7,000.0 µs, the target alone 8,000.0 µs"),
        ({"median_us": -1}, "no output of vllm bench forward: ValueError: expected microseconds"),
        ({"median_us": float("nan")}, "expected microseconds above 0"),
        ({"ranks": []}, "no output of vllm bench forward: IndexError"),
        ({"ranks": [{"timing_scope": "all"}]}, "no output of vllm bench forward: KeyError"),
        ({"requests": [{"query_len": 4, "kv_len": 2, "num_draft_tokens": 3}]}, "a KV length below"),
    ],
)
def test_a_wrong_run_is_refused(
    changes: dict[str, Any], words: str, runs: dict[str, str], tmp_path: Path
) -> None:
    drafting = write_run(tmp_path / "other.json", 8500.0, drafts=True, **changes)
    with pytest.raises(EstimateError, match=words):
        estimated(runs["target"], f"BF16={drafting}")
