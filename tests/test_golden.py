"""Golden acceptance: figures that follow from counts, a file that says nothing else, and its forms.

experiments/monitoring holds rules against a real Prometheus, experiments/served the
settings of vLLM against a real server.
"""

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from draftquant.recipes.errors import GoldenError
from draftquant.scripts.cli import main
from draftquant.validate.golden.golden_acceptance import (
    Golden,
    categories_of,
    golden_document,
    read_golden,
)
from draftquant.validate.golden.golden_sources import (
    golden_of_measurement,
    golden_of_replay,
    golden_of_report,
)
from draftquant.validate.golden.prometheus import Queries, check_window, limits_of, prometheus_rules
from draftquant.validate.golden.synthetic import simulation
from handmade_measurements import losing, measurement, written
from handmade_replays import noisy, replay
from handmade_reports import comparison, document, joint, served, text_of
from told import telling

_told = telling(
    "main", "golden_of_measurement", "golden_of_replay", "golden_of_report", "limits_of"
)

Capsys = pytest.CaptureFixture[str]
HISTOGRAMS = [(5, 3, 2), (1, 4, 5), (8, 1, 1), (2, 2, 6)]


def golden() -> Golden:
    """Of four prompts in two categories, K = 2."""
    return golden_of_replay(replay(HISTOGRAMS, categories="ab"), draft_sha256="5" * 64)


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


def test_figures_follow_from_the_counts_of_the_prompts() -> None:
    found = golden()
    own = found.all
    assert (own.prompts, own.clusters, own.verify_steps) == (4, 4, 40)
    assert own.accepted_at == (24, 14)  # 40 steps, of which 16 accepted nothing
    assert own.mean_acceptance_length == 1 + 38 / 40
    assert own.histogram == (16, 10, 14)
    assert own.acceptance_rates == (0.6, 0.35)
    assert own.variance_of_step == pytest.approx((10 + 14 * 4) / 40 - 0.95**2)
    # Each prompt has 10 steps, of which the mean would accept 9.5 tokens.
    assert own.variance_of_request == pytest.approx(np.mean([2.5**2, 4.5**2, 6.5**2, 4.5**2]))
    assert own.design_effect == pytest.approx(own.variance_of_request / 10 / own.variance_of_step)
    assert list(found.categories) == ["", "a", "b"]
    assert found.categories["a"].mean_acceptance_length == 1 + 10 / 20


def test_a_file_says_what_was_counted_and_what_does_not_follow_is_refused(path: Path) -> None:
    assert read_golden(path) == golden()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["prompts"][0] == {"category": "a", "cluster": 0, "histogram": [5, 3, 2]}
    figures = found["categories"]
    around = dict(reversed(figures.items()))  # categories may stand in any order
    path.write_text(json.dumps(found | {"categories": around}), encoding="utf-8")
    assert read_golden(path) == golden()
    other = figures | {"a": figures["a"] | {"mean_acceptance_length": 1.6}}
    for changes, said in (
        ({"categories": other}, "categories.a.mean_acceptance_length"),
        ({"categories": {"": figures[""]}}, "give, ['', 'a', 'b']"),
        ({"num_draft_tokens": 3}, "expected 4 counts of verify steps"),
        ({"prompts": []}, "empty list"),
        ({"draft_sha256": "5" * 63}, "draft_sha256: expected 64 hex digits"),
        ({"temperature": -1}, "temperature: expected at least 0"),
        ({"schema_version": 2}, "schema_version: expected 1"),
        ({"mean": 3}, "unknown key"),
    ):
        path.write_text(json.dumps(found | changes), encoding="utf-8")
        with pytest.raises(GoldenError) as caught:
            read_golden(path)
        assert said in str(caught.value)
        assert "--golden" in str(caught.value)
    path.unlink()
    with pytest.raises(GoldenError, match="cannot be read"):
        read_golden(path)


def test_each_source_gives_all_its_verify_steps_as_they_were_counted() -> None:
    run = measurement([[1, 0, 1], [1, 1]], categories="ab", draft="d", draft_sha256="6" * 64)
    found = golden_of_measurement(run)
    assert (found.all.verify_steps, found.all.accepted_at) == (5, (4,))
    assert (found.source, found.source_version, found.target) == ("vllm", "0.32.0", "target")
    assert (found.draft, found.draft_sha256) == ("d", "6" * 64)
    assert found.prompts_sha256 == run.setup.asked.prompts_sha256
    assert found.estimand == "greedy speculative decoding by vllm 0.32.0"
    edge = measurement([[1, 1]] * 2, of_record=[{"num_prompt_tokens": 1023}] * 2)
    assert list(golden_of_measurement(edge).context_bins) == ["1k-4k"]  # prefill writes a token
    plain = dataclasses.replace(run, setup=dataclasses.replace(run.setup, speculation=None))
    with pytest.raises(GoldenError, match="drafted nothing"):
        golden_of_measurement(plain)
    found = golden_of_report(document(comparison(categories="ab")))
    counted = golden_of_replay(replay(noisy(3, 4), categories="ab"), draft_sha256=None)
    assert (found.prompts, found.prompts_sha256) == (counted.prompts, counted.prompts_sha256)
    assert (found.source, found.draft_sha256) == ("replay", "2" * 64)
    assert golden_of_report(document(joint())).all.accepted_at == found.all.accepted_at
    with pytest.raises(GoldenError, match="measure --show"):
        golden_of_report(document(served()))


# ---- settings of engines, rules for Prometheus


def test_vllm_gets_unconditional_rates_and_the_others_a_mean() -> None:
    option, config = shlex.split(simulation(golden().all, "vllm").line)
    assert option == "--speculative-config"
    assert json.loads(config) == {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.6, 0.35],
    }
    found = simulation(golden().all, "sglang")
    method = "SGLANG_SIMULATE_ACC_METHOD=match-expected"
    assert found.line.split()[:2] == ["SGLANG_SIMULATE_ACC_LEN=1.95", method]
    assert "--speculative-num-draft-tokens 3 (K + 1)" in found.notes[0]
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
    found: Golden, engine: Any = "vllm", model: str | None = None, label: str | None = None
) -> list[dict[str, Any]]:
    limits = limits_of(found, 0.01, by_category=label is not None)
    text = prometheus_rules(found, limits, Queries.of(engine, model, label), "1h")
    (group,) = yaml.safe_load(text)["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def _rules(engine: Any, model: str | None = None) -> dict[str, dict[str, Any]]:
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


def test_the_command_prints_writes_and_refuses(path: Path, tmp_path: Path, capsys: Capsys) -> None:
    assert main(["golden", str(path), "--for", "sglang", "--category", "a"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("SGLANG_SIMULATE_ACC_LEN=1.5 ")
    assert "the mean alone" in told.err
    rules = ["golden", str(path), "--for", "prometheus", "--engine", "vllm",
             "--out", str(tmp_path / "rules.yml")]  # fmt: skip
    assert main(rules) == 0
    tmp_path.joinpath("two.json").write_text(golden_document(of_two()), encoding="utf-8")
    label = ["--engine", "vllm", "--category-label", "category"]
    assert main(["golden", str(tmp_path / "two.json"), "--for", "prometheus", *label]) == 0
    assert main(["golden", str(path), "--for", "prometheus", "--engine", "sglang"]) == 0
    assert main(["golden", str(path)]) == 0
    capsys.readouterr()
    for words, said in (
        (rules, "already exists"),
        (["golden", str(path), "--for", "prometheus"], "--engine"),
        (["golden", str(path), "--category", "c"], "has no category 'c', but a, b"),
        (["golden", str(path), "--out", "x"], "--for"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_whatever_counts_gives_golden_acceptance(tmp_path: Path, capsys: Capsys) -> None:
    """A measurement that is shown, a report or nothing at all, and the candidate's server."""
    out = tmp_path / "g.json"
    golden = ["--golden", str(out)]
    a, b = (losing(drop, name=name) for drop, name in enumerate("ab"))
    few = measurement([[1, 0, 1], [1, 1]], name="shown")
    shown = ["measure", "--show", str(written(tmp_path / "shown", few))]
    assert main([*shown, *golden]) == 0
    assert read_golden(out).all.accepted_at == (4,)
    assert list(read_golden(out).context_bins) == ["0-1k"]
    assert main([*shown, *golden]) == 2
    (tmp_path / "r.json").write_text(text_of(comparison(categories="ab")), encoding="utf-8")
    assert main(["report", str(tmp_path / "r.json"), *golden, "--overwrite"]) == 0
    assert read_golden(out).draft_sha256 == "2" * 64
    files = [str(written(tmp_path / one.name, one)) for one in (a, b)]
    runs = ["gate", "--measured", *files]
    assert main([*runs, *golden, "--overwrite"]) == 0
    assert (read_golden(out).source, read_golden(out).all) == ("vllm", golden_of_measurement(b).all)
    for drafts, place, said in ((["A", "B"], "g.json", "is of one draft, got 2"),
                                (["A"], str(out), "already exists")):  # fmt: skip
        assert main(["replay", *drafts, "--traces", "T", "--golden", place]) == 2
        assert said in capsys.readouterr().err
