"""Simulated servers change as told and part as told; the gate's bounds are not those of a guess.

A few seeded runs tell rates that lie far apart; the figures themselves need hundreds.
"""

import json

import numpy as np
import pytest
from draftquant.scripts.dev import bench_measured, simulated_servers
from draftquant.scripts.dev.bench_measured import PARTINGS, TABLES, main
from draftquant.scripts.dev.simulated_servers import Parting, measure
from draftquant.validate.measure.measurement_checks import record_problem
from draftquant.validate.served.measurement_pair import pair_measurements

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_population(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_servers, "_POPULATION", 3000)


def test_simulated_runs_are_measurements_that_part_as_told() -> None:
    generator = np.random.default_rng(0)
    baseline, candidate = measure(generator, 60, -0.02, Parting(hazard=0.004))
    for one in (baseline, candidate):
        assert [record_problem(record, one.setup) for record in one.records] == [None] * 60
    pair = pair_measurements(baseline, candidate)
    assert all(output.placed for output in pair.outputs)
    figures = pair.figures(0.95)
    assert 0.4 < figures.identical_share < 0.8  # 0.996 ** 127 = 0.60
    assert 0.65 < figures.common_share < 0.9
    assert figures.baseline_mean_acceptance_length == pytest.approx(2.9, abs=0.15)


def test_the_population_changes_as_told() -> None:
    """500 prompts on one text, with a deviation of 0.04: a standard error of 0.002."""
    runs = measure(np.random.default_rng(1), 500, -0.04, Parting(hazard=0.0, loss_with_ease=0.7))
    change = pair_measurements(*runs).change(0.95)
    assert change is not None
    assert change.relative_change == pytest.approx(-0.04, abs=0.008)
    assert 0.03 < change.standard_deviation < 0.06


def test_weighted_rounds_have_less_noise_than_whole_outputs() -> None:
    runs = measure(np.random.default_rng(2), 400, 0.0, PARTINGS["often, by chance"])
    pair = pair_measurements(*runs)
    weighted, figures = pair.change(0.95), pair.figures(0.95)
    assert weighted is not None
    assert figures.whole_change is not None
    assert figures.common_change is not None
    assert weighted.standard_deviation < 0.9 * figures.whole_change.standard_deviation
    assert figures.common_change.standard_deviation < weighted.standard_deviation


def test_common_text_alone_is_that_of_easy_text() -> None:
    """Where hard text parts sooner and loses more, it sees too small a loss; weights do not."""
    parting = PARTINGS["nearly always, sooner where hard, which loses more"]
    found = np.zeros(2)
    for seed in range(3):
        pair = pair_measurements(*measure(np.random.default_rng(seed), 1200, -0.04, parting))
        common, weighted = pair.figures(0.95).common_change, pair.change(0.95)
        assert common is not None
        assert weighted is not None
        found += [common.relative_change / 3, weighted.relative_change / 3]
    assert found[0] > -0.034
    assert found[1] == pytest.approx(-0.04, abs=0.005)


def test_the_tables_have_every_way_of_parting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {name: PARTINGS[name] for name in list(PARTINGS)[:2]}
    monkeypatch.setattr(bench_measured, "PARTINGS", few)
    assert main(["--runs", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["tables"]) == set(TABLES)
    assert list(told["tables"]["coverage"]["rows"]) == list(few)
    assert main(["--runs", "1", "--tables", "coverage"]) == 0
    assert "Coverage of the bounds" in capsys.readouterr().out
