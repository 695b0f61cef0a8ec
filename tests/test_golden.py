"""Golden acceptance: figures that follow from counts, and a file that says nothing else."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftquant.recipes.errors import GoldenError
from draftquant.validate.counting.paired_change import pooled_mean
from draftquant.validate.golden.golden_acceptance import (
    Golden,
    GoldenCategory,
    GoldenPrompt,
    golden_document,
    read_golden,
)
from draftquant.validate.golden.golden_sources import (
    golden_of_measurement,
    golden_of_replay,
    golden_of_report,
)
from handmade_measurements import measurement
from handmade_replays import noisy, replay
from handmade_reports import comparison, document, joint, served

HISTOGRAMS = [(5, 3, 2), (1, 4, 5), (8, 1, 1), (2, 2, 6)]


def golden() -> Golden:
    """Of four prompts in two categories, K = 2."""
    return golden_of_replay(replay(HISTOGRAMS, categories="ab"), draft_sha256="5" * 64)


def written(path: Path, **changes: Any) -> Path:
    """A file, with other values at its keys."""
    found = json.loads(golden_document(golden()))
    path.write_text(json.dumps({**found, **changes}), encoding="utf-8")
    return path


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


def test_the_standard_error_is_that_of_the_jackknife_over_clusters() -> None:
    sums, steps = [7, 14, 3, 14], [10, 10, 10, 10]
    bounded = pooled_mean(sums, steps, confidence=0.95)
    error = golden().all.standard_error
    assert error is not None
    assert bounded.upper - bounded.estimate == pytest.approx(2.353363 * error)  # t of 3
    copies = replay([*HISTOGRAMS, HISTOGRAMS[0]], texts=[0, 1, 2, 3, 0])
    found = golden_of_replay(copies, draft_sha256=None).all
    assert (found.prompts, found.clusters) == (5, 4)
    alone = GoldenCategory.of([GoldenPrompt(category="a", cluster=0, histogram=(1, 2))])
    assert alone.standard_error is None
    sure = [GoldenPrompt(category="", cluster=i, histogram=(0, 9)) for i in (1, 2)]
    assert GoldenCategory.of(sure).design_effect is None  # it accepts all, without variance


def test_a_file_says_what_was_counted_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "G.json"
    path.write_text(golden_document(golden()), encoding="utf-8")
    assert read_golden(path) == golden()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["prompts"][0] == {"category": "a", "cluster": 0, "histogram": [5, 3, 2]}
    around = dict(reversed(_figures().items()))  # categories may stand in any order
    assert read_golden(written(tmp_path / "G.json", categories=around)) == golden()


def _figures(**changes: Any) -> dict[str, Any]:
    found = json.loads(golden_document(golden()))["categories"]
    return {**found, "a": {**found["a"], **changes}}


def test_what_does_not_follow_is_refused(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        (
            {"categories": _figures(mean_acceptance_length=1.6)},
            "categories.a.mean_acceptance_length",
        ),
        ({"categories": {"": _figures()[""]}}, "give, ['', 'a', 'b']"),
        ({"num_draft_tokens": 3}, "expected 4 counts of verify steps"),
        ({"prompts": []}, "empty list"),
        ({"draft_sha256": "5" * 63}, "draft_sha256: expected 64 hex digits"),
        ({"temperature": -1}, "temperature: expected at least 0"),
        ({"schema_version": 2}, "schema_version: expected 1"),
        ({"mean": 3}, "unknown key"),
    ]
    for changes, said in rows:
        with pytest.raises(GoldenError) as caught:
            read_golden(written(tmp_path / "G.json", **changes))
        assert said in str(caught.value)
        assert "--golden" in str(caught.value)


def test_a_measurement_gives_all_its_verify_steps_as_they_were_counted() -> None:
    run = measurement([[1, 0, 1], [1, 1]], categories="ab", draft="d", draft_sha256="6" * 64)
    found = golden_of_measurement(run)
    assert (found.all.verify_steps, found.all.accepted_at) == (5, (4,))
    assert (found.source, found.source_version, found.target) == ("vllm", "0.32.0", "target")
    assert (found.draft, found.draft_sha256) == ("d", "6" * 64)
    assert found.prompts_sha256 == run.setup.asked.prompts_sha256
    assert found.estimand == "greedy speculative decoding by vllm 0.32.0"


def test_a_report_gives_the_candidate_as_it_was_replayed() -> None:
    found = golden_of_report(document(comparison(categories="ab")))
    counted = golden_of_replay(replay(noisy(3, 4), categories="ab"), draft_sha256=None)
    assert found.prompts == counted.prompts
    assert found.prompts_sha256 == counted.prompts_sha256
    assert (found.source, found.draft_sha256) == ("replay", "2" * 64)
    both = golden_of_report(document(joint()))
    assert both.all.accepted_at == found.all.accepted_at


def test_what_has_no_counts_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="measure --show"):
        golden_of_report(document(served()))
    run = measurement([[0]])
    plain = dataclasses.replace(run, setup=dataclasses.replace(run.setup, speculation=None))
    with pytest.raises(GoldenError, match="drafted nothing"):
        golden_of_measurement(plain)
    with pytest.raises(GoldenError, match="cannot be read"):
        read_golden(tmp_path / "G.json")
