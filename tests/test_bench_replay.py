"""The benchmark of replay and recording, on a pair that is 64 times narrower."""

import json
import sys
from pathlib import Path

import pytest
from draftquant.scripts.dev import bench_replay
from draftquant.scripts.dev.bench_replay import Inputs, Job, Measurement, main, measure, plan_jobs
from draftquant.scripts.dev.real_shapes.drafts import REAL_DRAFTS
from draftquant.scripts.dev.real_shapes.target import target_config, target_shapes

pytestmark = pytest.mark.slow

INPUTS = Inputs(drafts=(Path("a"), Path("b")), traces=Path("t"), target=Path("m"), out=Path("w"))


def test_both_dtypes_are_timed_with_one_prompt_and_with_all() -> None:
    jobs = plan_jobs(INPUTS, device="cpu", tokens=64, prompts=4, record=True)
    assert [job.name for job in jobs] == [
        "replay float32, K = 3, one prompt at a time",
        "replay float32, K = 3, prompts together",
        "replay bfloat16, K = 3, one prompt at a time",
        "replay bfloat16, K = 3, prompts together",
        "record bfloat16, one prompt at a time",
        "record bfloat16, prompts together",
        "record float32, prompts together",
    ]
    assert [job.options["batch_size"] for job in jobs] == [1, None, 1, None, 1, 4, 4]
    assert {job.options["device"] for job in jobs} == {"cpu"}
    few = plan_jobs(INPUTS, device="cpu", tokens=64, prompts=4, record=False,
                    num_draft_tokens=(3, 7), dtypes=("bfloat16",), sizes=(None,))  # fmt: skip
    assert [job.options["num_draft_tokens"] for job in few] == [3, 7]


def test_the_target_is_as_wide_as_the_real_one() -> None:
    config = target_config(REAL_DRAFTS["kimi-k2.5-eagle3"].config())
    shapes = target_shapes(config)
    assert shapes["model.embed_tokens"] == (163_840, 7_168)
    assert shapes["model.layers.1.mlp.up_proj"] == (12_288, 7_168)
    assert shapes["model.layers.0.self_attn.k_proj"] == (8 * 128, 7_168)
    assert len(shapes) == 2 + 2 * 9


def test_a_small_pair_is_made_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [str(tmp_path), "--divide", "64", "--prompts", "2", "--tokens", "48"]
    assert main([*small, "--record", "--device", "cpu", "--json"]) == 0
    found = [Measurement(**one) for one in json.loads(capsys.readouterr().out)]
    assert len(found) == 7
    for one in found:
        assert one.error is None
        assert one.seconds > 0
        assert one.load_seconds > 0
        assert one.peak_rss_bytes > 100 * 2**20
        replays = one.name.startswith("replay")
        assert one.tokens == (2 * 2 * 48 if replays else 2 * 48)
        assert (one.estimated_bytes is not None) == replays
        assert one.cpu_seconds > 0
        assert (one.share_of_gemm is not None) == replays
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {
        "kimi-k2.5-eagle3-64", "kimi-k2.5-eagle3-64-mi325x-w4a8", "traces-64-2x48", "target-64",
    }  # fmt: skip
    few = [*small, "--dtype", "float32", "--batch-size", "0"]
    assert main(few) == 0  # what is there already is used again
    assert "replay on auto" in capsys.readouterr().out
    assert main([*few, "--beside", sys.executable]) == 0
    assert "equal" in capsys.readouterr().out


def test_a_measurement_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(
        name="replay x", kind="make target", options={"draft": "none", "divide": 1, "out": ""}
    )
    failed = measure(job)
    assert failed.error is not None
    assert "KeyError: 'none'" in failed.error
    bench_replay.print_measurements([failed], "cpu")
    assert "failed" in capsys.readouterr().out


def test_what_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--divide", "64", "--recipe", "none"]) == 2
    said = capsys.readouterr().err
    assert "error: quantize: failed" in said
    assert "fix: use another WORKDIR" in said
