"""What is made of golden acceptance: settings of engines, rules for Prometheus, a dashboard.

experiments/monitoring holds rules and dashboards against a real Prometheus, experiments/served the
settings of vLLM against a real server.
"""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from draftquant.recipes.errors import GoldenError
from draftquant.recipes.listener import Listener
from draftquant.scripts.cli import main
from draftquant.validate.golden.golden_acceptance import (
    Golden,
    categories_of,
    golden_document,
    read_golden,
)
from draftquant.validate.golden.golden_sources import golden_of_measurement, golden_of_replay
from draftquant.validate.golden.grafana_dashboard import grafana_dashboard
from draftquant.validate.golden.prometheus import Queries, check_window, limits_of, prometheus_rules
from draftquant.validate.golden.synthetic import simulation
from draftquant.validate.judging.judgement import judge
from draftquant.validate.measure.measurement import EngineName, Measurement
from draftquant.validate.measure.measurement_file import line_of
from draftquant.validate.runs.gate_run import Measured, _golden
from draftquant.validate.runs.judging_asked import Form, GateRun, GoldenRun
from handmade_measurements import alternating, measurement
from handmade_replays import BASELINE, FIGURES, RELEASE, replay
from handmade_reports import HASHES, comparison, document, served, text_of
from test_golden import golden


def of_two() -> Golden:
    """K = 2, of 40 prompts: those of category "b" accept more than those of "a"."""
    histograms = [(6 - i % 3 - 2 * (i % 2), 2, 2 + i % 3 + 2 * (i % 2)) for i in range(40)]
    return golden_of_replay(replay(histograms, categories="ab"), draft_sha256="5" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of it."""
    place = tmp_path / "golden.json"
    place.write_text(golden_document(golden()), encoding="utf-8")
    return place


def test_vllm_gets_unconditional_rates_and_the_others_a_mean() -> None:
    option, config = shlex.split(simulation(golden().all, "vllm").line)
    assert option == "--speculative-config"
    assert json.loads(config) == {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.6, 0.35],
    }
    line, notes = (getattr(simulation(golden().all, "sglang"), name) for name in ("line", "notes"))
    assert line.split()[:2] == [
        "SGLANG_SIMULATE_ACC_LEN=1.95",
        "SGLANG_SIMULATE_ACC_METHOD=match-expected",
    ]
    assert "--speculative-num-draft-tokens 3 (K + 1)" in notes[0]
    found = simulation(golden().all, "tensorrt-llm")
    assert found.line == "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=0.95"


def test_no_name_ends_a_comment_or_is_a_template() -> None:
    for name in ('{{ "x" }}\nrules: []\x07', '{{{ "x" }}}'):
        evil = dataclasses.replace(golden(), draft=name)
        (rule,) = (one for one in _all_rules(evil) if one.get("alert") == "DraftAcceptanceFell")
        assert "{{" not in rule["annotations"]["description"]
    histograms = [(5, 3, 2), (1, 4, 5)]
    evil = golden_of_replay(replay(histograms), draft_sha256=None)
    named = tuple(dataclasses.replace(one, category='{{ "x" }}') for one in evil.prompts)
    evil = dataclasses.replace(evil, prompts=named, categories=categories_of(named))
    (rule,) = (one for one in _all_rules(evil, label="category") if "Fell" in one.get("alert", ""))
    assert rule["labels"]["category"] == '{ { "x" } }'
    assert '{category="{{ \\"x\\" }}"}' in rule["expr"]


def _all_rules(
    found: Golden, engine: EngineName = "vllm", model: str | None = None, label: str | None = None
) -> list[dict[str, Any]]:
    limits = limits_of(found, 0.01, by_category=label is not None)
    text = prometheus_rules(found, limits, Queries.of(engine, model, label), "1h")
    (group,) = yaml.safe_load(text)["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _rules(engine: EngineName, model: str | None = None) -> dict[str, dict[str, Any]]:
    rules = _all_rules(golden(), engine, model)
    return {rule.get("record") or rule["alert"]: rule for rule in rules}


def test_an_alert_is_below_the_limit_by_what_chance_does() -> None:
    expr, own = _rules("vllm")["DraftAcceptanceFell"]["expr"], golden().all
    assert own.design_effect is not None
    assert own.design_effect > 1
    (limit,) = limits_of(golden(), 0.01)
    assert own.standard_error is not None
    low = own.mean_acceptance_length - 1.96 * own.standard_error
    assert limit.lowest == pytest.approx(0.99 * low)
    assert limit.drop == pytest.approx(1 - 0.99 * low / own.mean_acceptance_length)
    variance = own.variance_of_request / 10  # per step: each request has ten
    assert f"< {limit.lowest:.6g} - 3.09 * sqrt({variance:.6g} / draftquant:verify_steps)" in expr
    assert expr.endswith("draftquant:verify_steps >= 1000")
    assert "< 1.095 " in _rules("vllm")["DraftAcceptsNothing"]["expr"]  # a tenth of 0.95


def test_each_category_has_a_limit_where_a_label_tells_it() -> None:
    rules = _all_rules(of_two(), label="category")
    assert rules[0]["expr"].startswith("sum by (model_name, category) (increase(vllm:spec_decode")
    assert " / on (model_name, category) group_left () " in rules[2]["expr"]
    fell = {
        one["labels"]["category"]: one for one in rules if one.get("alert") == "DraftAcceptanceFell"
    }
    for limit in limits_of(of_two(), 0.01, by_category=True):
        own = fell.pop(limit.category)
        only = f'{{category="{limit.category}"}}'
        assert f"(draftquant:acceptance_length{only} < {limit.lowest:.6g} - 3.29 *" in own["expr"]
        assert f"draftquant:verify_steps{only} >= 1000" in own["expr"]
        assert (
            f"category {limit.category} is {limit.golden.mean_acceptance_length:.4f}"
            in (own["annotations"]["description"])
        )
    assert not fell
    assert "sum by (model_name) (increase(vllm:generation_tokens_total" in rules[-1]["expr"]
    unnamed = dataclasses.replace(of_two(), categories={"": of_two().all})
    with pytest.raises(GoldenError, match="golden has no categories"):
        limits_of(unnamed, 0.01, by_category=True)


def test_what_prometheus_or_nobody_takes_is_refused() -> None:
    for label in ("", "a-b", "__name__", "model_name", "position", "severity"):
        with pytest.raises(GoldenError, match="--category-label"):
            Queries.of("vllm", None, label)
    for window in ("", "1", "h", "0m", "1h[", "1.5h", "1m1h", "5m5m", "99999w"):
        with pytest.raises(GoldenError, match="--window"):
            check_window(window)
    check_window("1h30m")
    for drop in (0, 1, -0.1, math.nan):
        with pytest.raises(GoldenError, match="--max-drop"):
            limits_of(golden(), drop)


def test_counters_are_those_of_the_engine_and_of_the_model_that_is_named() -> None:
    vllm, sglang = _rules("vllm", 'a"b'), _rules("sglang")
    assert vllm["draftquant:verify_steps"]["expr"] == (
        'sum by (model_name) (increase(vllm:spec_decode_num_drafts_total{model_name="a\\"b"}[1h]))'
    )
    assert "draftquant:accepted_at" in vllm
    assert '"\U0001f600"' in Queries.of("vllm", "\U0001f600", None).selector  # not as two halves
    assert "draftquant:accepted_at" not in sglang  # SGLang counts no positions
    assert sglang["draftquant:acceptance_length"]["expr"].startswith(
        "(sum by (model_name) (increase(sglang:generation_tokens_total[1h])) - sum by"
    )
    drafted = _rules("tensorrt-llm")["draftquant:verify_steps"]["expr"]
    assert 'trtllm_spec_decode_drafted_tokens_total{token_position="0"}' in drafted


def test_the_dashboard_shows_each_category_where_a_label_tells_it() -> None:
    limits = limits_of(of_two(), 0.01, by_category=True)
    queries = Queries.of("vllm", None, "category")
    panels = json.loads(grafana_dashboard(of_two(), limits, queries))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 7
    for i, limit in enumerate(limits):
        length = panels[3 * i]
        assert length["title"] == f"Mean acceptance length, {limit.category}"
        assert f'model_name=~"$model", category="{limit.category}"' in length["targets"][0]["expr"]
        assert length["targets"][2]["expr"] == f"vector({limit.lowest:.6g})"
        tops = [panel["gridPos"]["y"] for panel in panels[3 * i : 3 * i + 3]]
        assert tops == [18 * i, 18 * i, 18 * i + 9]
    assert "category" not in panels[-1]["targets"][0]["expr"]


def test_a_drop_that_no_draft_can_reach_is_refused() -> None:
    (limit,) = limits_of(golden(), 0.01)
    most = 1 - 0.99 / limit.lowest
    limits_of(golden(), most - 1e-4)
    with pytest.raises(GoldenError, match=rf"never fire[^~]*give a drop below {most:.4f}"):
        limits_of(golden(), most + 1e-4)
    for histograms, said in (
        ([(50, 0, 0), (40, 1, 0)], "monitor a draft that accepts"),
        ([(5, 3, 2)], "does not say how much requests differ"),
        ([(0, 0, 9), (0, 0, 9)], "does not say how much requests differ"),
    ):
        with pytest.raises(GoldenError, match=said):
            limits_of(golden_of_replay(replay(histograms), draft_sha256=None), 0.01)


def test_an_option_that_says_nothing_is_refused(path: Path) -> None:
    given: dict[str, Any]
    to: Form | None
    for to, given in (("grafana", {"model": "m"}), ("vllm", {"max_drop": 0.1}),
                      (None, {"engine": "vllm"}), ("sglang", {"category_label": "c"})):  # fmt: skip
        with pytest.raises(GoldenError, match=r"is for --for .* alone"):
            GoldenRun(path, to=to, **given).check()
    for model in ("", "a\n", "\udc80"):
        with pytest.raises(GoldenError, match="--model: expected a name"):
            GoldenRun(path, to="prometheus", model=model).check()


def test_the_command_prints_writes_and_refuses(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["golden", str(path), "--for", "sglang", "--category", "a"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("SGLANG_SIMULATE_ACC_LEN=1.5 ")
    assert "the mean alone" in told.err
    rules = ["golden", str(path), "--for", "prometheus", "--engine", "vllm",
             "--out", str(tmp_path / "rules.yml")]  # fmt: skip
    assert main(rules) == 0
    for words, said in (
        (rules, "already exists"),
        (["golden", str(path), "--for", "prometheus"], "--engine"),
        (["golden", str(path), "--category", "c"], "has no category 'c', but a, b"),
        (["golden", str(path), "--out", "x"], "--for"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def written(run: Measurement, folder: Path) -> str:
    place = folder / f"{run.name}.jsonl"
    place.write_text("".join(map(line_of, (run.setup, *run.records))), encoding="utf-8")
    return str(place)


def test_whatever_counts_gives_golden_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement that is shown, a report or nothing at all, and the candidate's server."""
    out, report, page = (tmp_path / name for name in ("g.json", "r.json", "r.md"))
    shown = ["measure", "--show", written(measurement([[1, 0, 1], [1, 1]]), tmp_path)]
    assert main([*shown, "--golden", str(out)]) == 0
    assert read_golden(out).all.accepted_at == (4,)
    assert list(read_golden(out).context_bins) == ["0-1k"]
    assert main([*shown, "--golden", str(out)]) == 2
    report.write_text(text_of(comparison(categories="ab")), encoding="utf-8")
    again = ["report", str(report), "--golden", str(out), "--overwrite"]
    assert main(again) == 0
    assert read_golden(out).draft_sha256 == "2" * 64
    report.write_text(text_of(served()), encoding="utf-8")
    capsys.readouterr()
    assert main([*again, "--markdown", str(page)]) == 2
    assert "measure --show" in capsys.readouterr().err
    assert not page.exists()
    runs = [
        measurement([alternating(200, 80 + i % 5 + drop) for i in range(40)], name=name)
        for name, drop in (("a", 0), ("b", 1))
    ]
    files = [written(run, tmp_path) for run in runs]
    assert main(["gate", "--measured", *files, "--golden", str(out), "--overwrite"]) == 0
    assert (read_golden(out).source, read_golden(out).all) == (
        "vllm", golden_of_measurement(runs[1]).all,
    )  # fmt: skip


def test_no_verdict_is_lost_because_nothing_was_counted(tmp_path: Path) -> None:
    """A candidate that cannot be compared has no prompts in its report."""
    other = dataclasses.replace(FIGURES, sha256="1" * 64)
    judged = judge(replay(BASELINE), replay(BASELINE, traces=other), RELEASE, background=HASHES)
    assert judged.verdict == "ANOMALOUS"
    told: list[str] = []
    listener = MagicMock(spec=Listener, warning=told.append)
    settings = GateRun(golden=tmp_path / "g.json", listener=listener)
    alone = Measured(runs=None, again=None, parity=())
    assert _golden(settings, document(judged), alone) == {}
    assert "no golden acceptance is written" in told[0]


def test_golden_acceptance_is_of_one_draft_and_takes_no_place(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafts, place, said in ((["A", "B"], "g.json", "is of one draft, got 2"),
                                (["A"], str(path), "already exists")):  # fmt: skip
        assert main(["replay", *drafts, "--traces", "T", "--golden", place]) == 2
        assert said in capsys.readouterr().err
