"""What is made of golden acceptance: settings of engines, rules for Prometheus, a dashboard.

tests/monitoring holds rules and dashboards against a real Prometheus, tests/served the settings of
vLLM against a real server.
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
from draftquant.quantize.errors import OutputError
from draftquant.scripts.api.gate import GateSettings, _golden_file
from draftquant.scripts.api.gate_measured import Measured
from draftquant.scripts.api.golden import Form, GoldenSettings
from draftquant.scripts.api.listener import Listener
from draftquant.scripts.cli import main
from draftquant.validate.errors import GoldenError
from draftquant.validate.golden.golden import Golden
from draftquant.validate.golden.golden_file import golden_document, read_golden
from draftquant.validate.golden.golden_sources import golden_of_measurement, golden_of_replay
from draftquant.validate.golden.grafana_dashboard import grafana_dashboard
from draftquant.validate.golden.prometheus_rules import Alarm, prometheus_rules
from draftquant.validate.golden.promql import Queries, check_window
from draftquant.validate.golden.synthetic import inferencex, simulation
from draftquant.validate.judging.judgement import judge
from draftquant.validate.measure.measurement import EngineName
from draftquant.validate.measure.measurement_file import line_of
from handmade_measurements import alternating, measurement
from handmade_replays import BASELINE, FIGURES, RELEASE, replay
from handmade_reports import HASHES, comparison, document, served, text_of

ALARM = Alarm(max_drop=0.03, window="1h")


def golden() -> Golden:
    """K = 2, acceptance length 1.95: 24 and 14 of 40 verify steps accepted a token there."""
    histograms = [(5, 3, 2), (1, 4, 5), (8, 1, 1), (2, 2, 6)]
    return golden_of_replay(replay(histograms, categories="ab"), draft_sha256="5" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of it."""
    place = tmp_path / "golden.json"
    place.write_text(golden_document(golden()), encoding="utf-8")
    return place


def test_vllm_gets_unconditional_rates() -> None:
    option, config = shlex.split(simulation(golden().all, "vllm").line)
    assert option == "--speculative-config"
    assert json.loads(config) == {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.6, 0.35],
    }


def test_the_others_get_the_mean_each_as_it_counts() -> None:
    line = simulation(golden().all, "sglang").line
    assert line.split()[:2] == [
        "SGLANG_SIMULATE_ACC_LEN=1.95",
        "SGLANG_SIMULATE_ACC_METHOD=match-expected",
    ]
    found = simulation(golden().all, "tensorrt-llm")
    assert found.line == "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=0.95"
    assert "give 1 there" in found.notes[1]


def test_inferencex_has_target_mode_and_length() -> None:
    for target in ("org/M", 'a"b: \n#', "\U0001f600\x7f", "yes"):
        text = inferencex(golden().categories["b"], target=target, thinking=True)
        assert yaml.safe_load(text) == {target: {"thinking_on": {2: 2.4}}}


def test_no_name_ends_a_comment_or_is_a_template() -> None:
    evil = dataclasses.replace(golden(), draft='{{ "x" }}\nrules: []\x07')
    text = prometheus_rules(evil, "", Queries(engine="vllm"), ALARM)
    (group,) = yaml.safe_load(text)["groups"]
    assert '{{ "x"' not in group["rules"][3]["annotations"]["description"]
    odd = dataclasses.replace(golden(), draft='{{{ "x" }}}')
    (group,) = yaml.safe_load(prometheus_rules(odd, "", Queries(engine="vllm"), ALARM))["groups"]
    assert "{{" not in group["rules"][3]["annotations"]["description"]


def _rules(engine: EngineName, model: str | None = None) -> dict[str, dict[str, Any]]:
    text = prometheus_rules(golden(), "", Queries.of(engine, model), ALARM)
    (group,) = yaml.safe_load(text)["groups"]
    return {rule.get("record") or rule["alert"]: rule for rule in group["rules"]}


def test_the_limit_is_golden_less_the_drop_and_less_what_chance_does() -> None:
    expr = _rules("vllm")["DraftAcceptanceFell"]["expr"]
    own = golden().all
    assert own.standard_error is not None
    assert own.design_effect is not None
    assert own.design_effect > 1
    limit, own_error = 1.95 * 0.97, (own.standard_error * 0.97) ** 2
    spread = own.variance_of_request / 10  # per step: each request has ten
    assert f"< {limit:.6g} - 3.09 * sqrt({own_error:.6g} + {spread:.6g} /" in expr
    assert expr.endswith("draftquant:verify_steps >= 1000")
    assert "< 1.095 " in _rules("vllm")["DraftAcceptsNothing"]["expr"]  # a tenth of 0.95


def test_counters_are_those_of_the_engine_and_of_the_model_that_is_named() -> None:
    vllm, sglang = _rules("vllm", 'a"b'), _rules("sglang")
    assert vllm["draftquant:verify_steps"]["expr"] == (
        'sum by (model_name) (increase(vllm:spec_decode_num_drafts_total{model_name="a\\"b"}[1h]))'
    )
    assert "draftquant:accepted_at" in vllm
    assert '"\U0001f600"' in Queries.of("vllm", "\U0001f600").selector  # not as two halves
    assert "draftquant:accepted_at" not in sglang  # SGLang counts no positions
    assert sglang["draftquant:acceptance_length"]["expr"].startswith(
        "(sum by (model_name) (increase(sglang:generation_tokens_total[1h])) - sum by"
    )
    drafted = _rules("tensorrt-llm")["draftquant:verify_steps"]["expr"]
    assert 'trtllm_spec_decode_drafted_tokens_total{token_position="0"}' in drafted


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_the_dashboard_shows_golden_beside_what_is_counted(engine: EngineName) -> None:
    found = json.loads(grafana_dashboard(golden(), "a", Queries(engine=engine), ALARM))
    panels = {panel["title"]: panel for panel in found["panels"]}
    assert len({panel["id"] for panel in found["panels"]}) == len(panels)
    asked = {one["legendFormat"]: one["expr"] for one in
             panels["Mean acceptance length"]["targets"]}  # fmt: skip
    assert asked["golden"] == "vector(1.5)"
    assert asked["limit"] == "vector(1.455)"
    assert 'model_name=~"$model"' in asked["{{model_name}}"]
    assert ("Accepted at each position" in panels) == (engine != "sglang")


@pytest.mark.parametrize("window", ["", "1", "h", "0m", "1h[", "1.5h", "1m1h", "5m5m", "99999w"])
def test_a_window_is_a_time(window: str) -> None:
    with pytest.raises(GoldenError, match="--window"):
        check_window(window)
    check_window("1h30m")


@pytest.mark.parametrize("drop", [0, 1, -0.1, math.nan])
def test_a_drop_is_a_share(drop: float) -> None:
    with pytest.raises(GoldenError, match="--max-drop"):
        Alarm(max_drop=drop, window="1h").check(golden().all)


def test_a_drop_that_no_draft_can_reach_is_refused() -> None:
    Alarm(max_drop=0.48, window="1h").check(golden().all)
    with pytest.raises(GoldenError, match=r"never fire[^~]*give a drop below 0.4872"):
        Alarm(max_drop=0.49, window="1h").check(golden().all)
    nothing = golden_of_replay(replay([(5, 0, 0), (4, 0, 0)]), draft_sha256=None)
    with pytest.raises(GoldenError, match="monitor a draft that accepts"):
        ALARM.check(nothing.all)


@pytest.mark.parametrize(
    ("to", "given"),
    [
        ("grafana", {"model": "m"}),
        ("vllm", {"max_drop": 0.1}),
        ("grafana", {"window": "2h"}),
        (None, {"engine": "vllm"}),
        ("sglang", {"thinking": "on"}),
    ],
)
def test_an_option_that_says_nothing_is_refused(
    path: Path, to: Form | None, given: dict[str, Any]
) -> None:
    with pytest.raises(GoldenError, match=r"is for --for .* alone"):
        GoldenSettings(path, to=to, **given).check()
    for model in ("", "a\n", "\udc80"):
        with pytest.raises(GoldenError, match="--model: expected a name"):
            GoldenSettings(path, to="prometheus", model=model).check()


def test_the_command_prints_writes_and_refuses(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["golden", str(path)]) == 0
    assert "1.9500" in capsys.readouterr().out
    assert main(["golden", str(path), "--for", "sglang", "--category", "a"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("SGLANG_SIMULATE_ACC_LEN=1.5 ")
    assert "the mean alone" in told.err
    out = tmp_path / "rules.yml"
    rules = ["golden", str(path), "--for", "prometheus", "--engine", "vllm", "--out", str(out)]
    assert main(rules) == 0
    assert "DraftAcceptanceFell" in out.read_text(encoding="utf-8")
    capsys.readouterr()
    for words, said in (
        (rules, "already exists"),
        (["golden", str(path), "--for", "prometheus"], "--engine"),
        (["golden", str(path), "--for", "inferencex"], "--thinking"),
        (["golden", str(path), "--category", "c"], "has no category 'c', but a, b"),
        (["golden", str(path), "--out", "x"], "--for"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_a_measurement_that_is_shown_gives_golden_acceptance(tmp_path: Path) -> None:
    run = measurement([[1, 0, 1], [1, 1]], categories="ab")
    file, out = tmp_path / "m.jsonl", tmp_path / "g.json"
    lines = "".join(map(line_of, (run.setup, *run.records)))
    file.write_text(lines, encoding="utf-8")
    assert main(["measure", "--show", str(file), "--golden", str(out)]) == 0
    found = read_golden(out)
    assert found.all.accepted_at == (4,)
    assert list(found.context_bins) == ["0-1k"]
    assert main(["measure", "--show", str(file), "--golden", str(out)]) == 2
    assert main(["measure", "--launch", "M", "--out", "O", "--golden", str(out)]) == 2


def test_a_report_gives_golden_acceptance_or_nothing_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, out, page = (tmp_path / name for name in ("r.json", "g.json", "r.md"))
    report.write_text(text_of(comparison(categories="ab")), encoding="utf-8")
    assert main(["report", str(report), "--golden", str(out)]) == 0
    assert read_golden(out).draft_sha256 == "2" * 64
    report.write_text(text_of(served()), encoding="utf-8")
    again = ["report", str(report), "--golden", str(out), "--markdown", str(page), "--overwrite"]
    assert main(again) == 2
    assert "measure --show" in capsys.readouterr().err
    assert not page.exists()


def test_the_gate_gives_what_the_candidates_server_counted(tmp_path: Path) -> None:
    runs = [
        measurement([alternating(200, 80 + i % 5 + drop) for i in range(40)], name=name)
        for name, drop in (("a", 0), ("b", 1))
    ]
    places = [tmp_path / f"{run.name}.jsonl" for run in runs]
    for run, place in zip(runs, places, strict=True):
        lines = "".join(map(line_of, (run.setup, *run.records)))
        place.write_text(lines, encoding="utf-8")
    out = tmp_path / "g.json"
    assert main(["gate", "--measured", *map(str, places), "--golden", str(out)]) in (0, 1, 3)
    found = read_golden(out)
    assert found.source == "vllm"
    assert found.all == golden_of_measurement(runs[1]).all


def test_no_verdict_is_lost_because_nothing_was_counted(tmp_path: Path) -> None:
    """A candidate that cannot be compared has no prompts in its report."""
    other = dataclasses.replace(FIGURES, sha256="1" * 64)
    judged = judge(replay(BASELINE), replay(BASELINE, traces=other), RELEASE, background=HASHES)
    assert judged.verdict == "ANOMALOUS"
    told: list[str] = []
    listener = MagicMock(spec=Listener, warning=told.append)
    settings = GateSettings(golden=tmp_path / "g.json", listener=listener)
    alone = Measured(runs=None, again=None, parity=())
    assert _golden_file(settings, document(judged), alone) == {}
    assert "no golden acceptance is written" in told[0]


def test_golden_acceptance_is_of_one_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "A", "B", "--traces", "T", "--golden", "g.json"]) == 2
    assert "is of one draft, got 2" in capsys.readouterr().err


def test_a_place_that_is_taken_is_refused_before_any_work(path: Path) -> None:
    from draftquant import api as dq

    with pytest.raises(OutputError, match="already exists"):
        dq.replay(["A"], "T", golden=path)
