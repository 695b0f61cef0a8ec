"""`--log-to`: what the gate found as a run of MLflow and of Weights & Biases, with their own code.

MLflow writes into a folder, Weights & Biases offline into another: nothing leaves the machine.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from draftquant.quantize.files.command_line import recorded_argv
from draftquant.scripts.cli import main
from draftquant.validate.errors import TrackingError
from draftquant.validate.judging.judgement import GateReport
from draftquant.validate.measure.measurement_file import line_of
from draftquant.validate.report.judged_again import Judgement
from draftquant.validate.tracking.tracked_run import TrackedRun, tracked_run
from draftquant.validate.tracking.trackers import Tracker, find_tracker
from handmade_measurements import alternating, measurement
from handmade_reports import comparison, document, evil_document, joint, retuned, text_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, and an environment in which both trackers stay in it."""
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("HOME", str(tmp_path)), ("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)),
        ("WANDB_CACHE_DIR", str(tmp_path / "cache")), ("WANDB_DATA_DIR", str(tmp_path / "data")),
        ("WANDB_ERROR_REPORTING", "false"), ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_ALLOW_FILE_STORE", "true"), ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return tmp_path


def runs_of(folder: Path, experiment: str = "draftquant") -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
    known = client.get_experiment_by_name(experiment)
    return list(client.search_runs([known.experiment_id])) if known else []


def run_of(judged: Judgement) -> TrackedRun:
    return tracked_run(document(judged), (Path("g.json"),))


def test_what_a_run_says_of_a_comparison() -> None:
    judged = comparison("PASS", categories="ab")
    assert isinstance(judged, GateReport)
    assert judged.change is not None
    run = run_of(judged)
    assert (run.name, run.verdict, run.reason) == ("int4", "PASS", judged.reason)
    lower, upper = judged.change.relative_bounds
    expected = {
        "baseline_acceptance_length": judged.baseline.mean_acceptance_length,
        "candidate_acceptance_length": judged.candidate.mean_acceptance_length,
        "num_prompts": judged.num_prompts,
        "relative_change": judged.relative_change,
        "relative_change_lower": lower,
        "relative_change_upper": upper,
        "effective_sample_size": judged.change.effective_num_prompts,
    }
    assert expected.items() <= run.metrics.items()
    first = judged.categories[0]
    assert first.change is not None
    assert run.metrics["category/a/num_prompts"] == first.num_prompts
    assert run.metrics["category/a/relative_change_lower"] == first.change.relative_bounds[0]
    assert judged.traces is not None
    known = {
        "baseline": "bf16", "baseline_sha256": "1" * 64, "candidate_sha256": "2" * 64,
        "recipe": "int4-channel", "recipe_sha256": "5" * 64, "policy": "release",
        "max_relative_drop": "0.01", "num_draft_tokens": str(judged.num_draft_tokens),
        "target": judged.traces.target.name, "traces_sha256": judged.traces.sha256,
    }  # fmt: skip
    assert known.items() <= run.params.items()


def test_each_of_several_comparisons_has_its_name() -> None:
    names = set(run_of(joint()).metrics)
    assert {"replayed/relative_change", "served/relative_change"} <= names
    both = run_of(retuned())
    assert {"against_tuned/relative_change", "against_bf16/relative_change"} <= set(both.metrics)
    assert both.params["tuned_sha256"] == "7" * 64


def test_categories_of_any_name_have_one_of_their_own() -> None:
    evil = tracked_run(evil_document(), ())
    assert all(len(name) <= 250 for name in evil.metrics)
    assert sum(name.endswith("/num_prompts") for name in evil.metrics) == 2
    assert all(len(value) <= 500 for value in evil.params.values())


def test_a_report_is_logged_to_mlflow(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "g.json").write_text(text_of(comparison("FAIL")), encoding="utf-8")
    uri = (here / "runs").as_uri()
    words = ["report", "g.json", "--html", "g.html", "--log-to", f"mlflow:{uri}"]
    assert main(words) == 0
    (run,) = runs_of(here / "runs")
    said = capsys.readouterr()
    assert said.out == ""
    assert f"logged to mlflow: {run.info.run_id}" in said.err
    assert (run.info.status, run.info.run_name) == ("FINISHED", "int4")
    report = json.loads((here / "g.json").read_text(encoding="utf-8"))
    assert (run.data.tags["verdict"], run.data.tags["reason"]) == ("FAIL", report["reason"])
    assert run.data.metrics["relative_change"] == pytest.approx(report["relative_change"])
    assert run.data.params["recipe"] == "int4-channel"
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"g.json", "g.html"}


def test_hostile_names_reach_mlflow(here: Path) -> None:
    uri = (here / "runs").as_uri()
    Tracker(name="mlflow", place=uri).log(tracked_run(evil_document(), ()))
    assert len(runs_of(here / "runs")) == 1


def test_many_categories_take_several_requests(here: Path) -> None:
    run = TrackedRun(
        name="n", verdict="PASS", reason="r", params={}, files=(),
        metrics={f"m{i}": float(i) for i in range(1001)},
    )  # fmt: skip
    Tracker(name="mlflow", place=(here / "runs").as_uri()).log(run)
    (found,) = runs_of(here / "runs")
    assert len(found.data.metrics) == 1001


def test_a_report_is_logged_to_wandb(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "g.json").write_text(text_of(comparison("PASS")), encoding="utf-8")
    assert main(["report", "g.json", "--markdown", "g.md", "--log-to", "wandb:drafts"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    (folder,) = here.glob("wandb/offline-run-*")
    assert f"logged to wandb: {folder}" in said.err
    (log,) = folder.glob("*.wandb")
    expected = {b"drafts", b"int4", b"relative_change_lower", b"PASS", b"g.json", b"g.md"}
    ends = time.monotonic() + 60  # the file is written by a process of wandb's own
    while (kept := {one for one in expected if one in log.read_bytes()}) != expected:
        assert time.monotonic() < ends, expected - kept
        time.sleep(0.1)


@pytest.fixture
def measured(here: Path) -> list[str]:
    """The gate's words for two measurements whose comparison passes."""
    for name, drop in (("a", 0), ("b", 1)):
        one = measurement([alternating(200, 80 + i % 5 + drop) for i in range(40)])
        text = line_of(one.setup) + "".join(map(line_of, one.records))
        (here / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return ["gate", "--measured", "a.jsonl", "b.jsonl"]


def test_the_gate_logs_its_verdict(here: Path, measured: list[str]) -> None:
    uri = (here / "runs").as_uri()
    assert main([*measured, "--report", "g.json", "--log-to", f"mlflow:{uri}"]) == 0
    (run,) = runs_of(here / "runs")
    assert run.data.tags["verdict"] == "PASS"
    assert "mlflow" not in (here / "g.json").read_text(encoding="utf-8")  # addresses have keys


def test_a_tracker_that_fails_is_exit_2_and_the_verdict_is_kept(
    here: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--report", "g.json", "--log-to", "mlflow:http://me:secret@127.0.0.1:9"]
    assert main([*measured, *words]) == 2
    said = capsys.readouterr().err
    assert "the verdict is PASS, and g.json is written; mlflow did not take the run: " in said
    assert "draftquant report g.json with the same --log-to" in said
    assert "secret" not in said
    assert json.loads((here / "g.json").read_text(encoding="utf-8"))["verdict"] == "PASS"
    assert main(["report", "g.json", "--log-to", f"mlflow:{(here / 'runs').as_uri()}"]) == 0
    assert len(runs_of(here / "runs")) == 1


def test_wandb_without_an_account_is_exit_2(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "g.json").write_text(text_of(comparison("FAIL")), encoding="utf-8")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    def refuse(**_given: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    assert main(["report", "g.json", "--log-to", "wandb"]) == 2
    said = capsys.readouterr().err
    assert "the verdict is FAIL, and g.json is written; wandb did not take the run: No API" in said


@pytest.mark.parametrize("asked", ["tensorboard", "mlflow:", ""])
def test_trackers_that_are_not_known(asked: str) -> None:
    with pytest.raises(TrackingError, match="expected mlflow, mlflow:URI, wandb or wandb:PROJECT"):
        find_tracker(asked)


def test_a_missing_package_is_said_before_any_work(
    here: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main([*measured, "--report", "g.json", "--log-to", "wandb"]) == 2
    said = capsys.readouterr().err
    assert "--log-to wandb: its package is not installed" in said
    assert "fix: pip install" in said
    assert not (here / "g.json").exists()


@pytest.mark.parametrize("asked", ["mlflow", "mlflow:sqlite:///runs.db"])
def test_mlflow_skinny_has_no_database(
    here: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], asked: str,
) -> None:  # fmt: skip
    """Said before any work; with the full package it is not in the way."""
    found = importlib.util.find_spec
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sqlalchemy" else found(name)
    )
    assert main([*measured, "--report", "g.json", "--log-to", asked]) == 2
    said = capsys.readouterr().err
    assert "a sqlite database needs the full package mlflow" in said
    assert "fix: pip install mlflow, or log to a server: --log-to mlflow:http://HOST:5000" in said
    assert not (here / "g.json").exists()
    whole = found("mlflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: whole)
    assert find_tracker(asked).name == "mlflow"


def test_without_a_report_file_there_is_nothing_to_log(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*measured, "--log-to", "wandb"]) == 2
    assert "--log-to: needs --report F.json" in capsys.readouterr().err
    assert main([*measured, "--log-to", "mlfow"]) == 2  # that is to be mended first
    assert "expected mlflow, mlflow:URI, wandb" in capsys.readouterr().err


def test_the_tracker_is_no_part_of_what_a_report_records() -> None:
    words = ["gate", "--log-to", "mlflow:http://a:b@host", "--policy", "release", "--log-to=wandb"]
    assert recorded_argv(words) == ("gate", "--policy", "release")


def test_neither_package_is_imported_before_it_is_needed(
    here: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would fail
    assert main([*measured, "--report", "g.json", "--html", "g.html"]) == 0
    assert (here / "g.html").is_file()
