"""Golden acceptance: counts in files, and profiles that say nothing else than their figures."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import draftquant.api as dq
import numpy as np
import pytest
from draftquant.recipes.errors import GoldenError
from draftquant.scripts.cli import main
from draftquant.validate.golden.golden_acceptance import Golden, golden_document
from draftquant.validate.golden.golden_sources import (
    golden_of_measurement,
    golden_of_replay,
    golden_of_report,
)
from draftquant.validate.golden.profile import (
    Accepted,
    Profile,
    profile_document,
    profile_of,
    read_profile,
)
from draftquant.validate.golden.synthetic import simulation
from handmade_measurements import losing, measurement, written
from handmade_replays import noisy, replay
from handmade_reports import comparison, document, joint, served, text_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_eagle3_llama

HISTOGRAMS = [(5, 3, 2), (1, 4, 5), (8, 1, 1), (2, 2, 6)]


def golden() -> Golden:
    """Of four prompts in two categories, K = 2."""
    return golden_of_replay(replay(HISTOGRAMS, categories="ab"), draft_sha256="5" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of it."""
    place = tmp_path / "golden.json"
    place.write_text(golden_document(golden()), encoding="utf-8")
    return place


def test_figures_follow_from_the_counts_of_the_prompts() -> None:
    found = profile_of(golden())
    assert (found.num_samples, found.num_draft_tokens, found.mean) == (4, 2, 1 + 38 / 40)
    assert found.acceptance_length_histogram == {1: 16, 2: 10, 3: 14}  # of 40 verify steps
    assert found.marginal_accept_rates == (0.6, 0.35)
    assert found.conditional_accept_rates == (0.6, round(14 / 24, 6))
    assert found.interval_95 is not None
    assert sum(found.interval_95) == pytest.approx(2 * found.mean)
    copies = replay([*HISTOGRAMS, *HISTOGRAMS], texts=[0, 1, 2, 3] * 2)
    assert profile_of(golden_of_replay(copies, draft_sha256=None)).interval_95 == found.interval_95
    alone = golden_of_replay(replay(HISTOGRAMS[:1]), draft_sha256=None)
    assert profile_of(alone).interval_95 is None


def test_counts_that_are_impossible_are_refused(path: Path) -> None:
    assert read_profile(path) == profile_of(golden())
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["prompts"][0] == {"category": "a", "cluster": 0, "histogram": [5, 3, 2]}
    earlier = {"categories": {"": {"mean_acceptance_length": 9}}, "context_bins": {}}
    path.write_text(json.dumps(found | earlier), encoding="utf-8")
    assert read_profile(path) == profile_of(golden())
    for changes in (
        {"num_draft_tokens": 3}, {"prompts": []}, {"draft_sha256": "5" * 63}, {"temperature": -1},
        {"schema_version": 2}, {"mean": 3},
    ):  # fmt: skip
        path.write_text(json.dumps(found | changes), encoding="utf-8")
        with pytest.raises(GoldenError):
            read_profile(path)
    path.unlink()
    with pytest.raises(GoldenError):
        read_profile(path)


def test_each_source_gives_all_its_verify_steps_as_they_were_counted() -> None:
    run = measurement([[1, 0, 1], [1, 1]], categories="ab", draft="d", draft_sha256="6" * 64)
    found = golden_of_measurement(run)
    assert profile_of(found).acceptance_length_histogram == {1: 1, 2: 4}
    assert found.draft_sha256 == "6" * 64
    assert found.prompts_sha256 == run.setup.asked.prompts_sha256
    edge = measurement([[1, 1]] * 2, of_record=[{"num_prompt_tokens": n} for n in (1023, 1021)])
    bins = profile_of(golden_of_measurement(edge)).per_category or {}  # prefill writes a token
    steps = {name: part.acceptance_length_histogram for name, part in bins.items()}
    assert steps == {"a": {1: 0, 2: 4}, "context 0-1k": {1: 0, 2: 1}, "context 1k-4k": {1: 0, 2: 3}}
    plain = dataclasses.replace(run, setup=dataclasses.replace(run.setup, speculation=None))
    with pytest.raises(GoldenError):
        golden_of_measurement(plain)
    found = golden_of_report(document(comparison(categories="ab")))
    counted = golden_of_replay(replay(noisy(3, 4), categories="ab"), draft_sha256=None)
    assert (found.prompts, found.prompts_sha256) == (counted.prompts, counted.prompts_sha256)
    assert (found.source, found.draft_sha256) == ("replay", "2" * 64)
    assert profile_of(golden_of_report(document(joint()))).rates == profile_of(found).rates
    with pytest.raises(GoldenError):
        golden_of_report(document(served()))


# ---- speculation profiles

DFLASH: dict[str, Any] = {
    "schema_version": "1.0",
    "measured": True,
    "producer": "ar_validate",
    "num_speculative_tokens": 3,
    "conditional_accept_rates": [0.719104, 0.645502, 0.624895],
    "marginal_accept_rates": [0.719104, 0.464183, 0.290066],
    "mean_accept_length": 2.473353,
    "mean_accept_length_per_request": 2.54671,
    "acceptance_length_histogram": {"1": 8611, "2": 7814, "3": 5337, "4": 8891},
    "measurement_conditions": {"dataset": "mt_bench", "osl": 32, "num_samples": 80},
}
"""As pull request 2315 of NVIDIA/Model-Optimizer writes it, with the histogram of its 2247."""


def said_of(tmp_path: Path, **changes: Any) -> Profile:
    """A profile with these changes, as it is read beside the weights of a draft."""
    place = tmp_path / "speculation_profile.json"
    place.write_text(json.dumps(DFLASH | changes), encoding="utf-8")
    return read_profile(tmp_path)


def test_a_profile_of_another_producer_is_read_without_what_it_lacks(tmp_path: Path) -> None:
    found = said_of(tmp_path)
    assert (found.method, found.accept_length_model, found.num_draft_tokens) == (None, None, 3)
    assert (found.rates, found.mean) == (tuple(DFLASH["marginal_accept_rates"]), 2.473353)
    kept = {"schema_version", "measured", "conditional_accept_rates"}
    alone = dict.fromkeys(DFLASH.keys() - kept)
    assert said_of(tmp_path, **alone).rates == pytest.approx(found.rates, abs=1e-6)
    rounded = {"conditional_accept_rates": None, "mean_accept_length": 2.185,
               "marginal_accept_rates": [0.719, 0.464, 0.002],
               "acceptance_length_histogram": {"1": 281, "2": 255, "3": 464}}  # fmt: skip
    assert said_of(tmp_path, **rounded).mean == 2.185
    of_block = {"verification_method": "block", "conditional_accept_rates": None,
                "marginal_accept_rates": None, "vectors_unavailable_reason": "jointly"}  # fmt: skip
    of_code = {"code": {"mean_accept_length": 2.9, "n": 1}}
    block = said_of(tmp_path, **of_block, per_category=of_code)
    assert (block.rates, block.mean, block.num_draft_tokens) == ((), 2.473353, 3)
    assert block.per_category == {"code": Accepted(mean_accept_length=2.9)}
    assert simulation(block, 3, "vllm") is simulation(block, 3, "dynamo") is None
    assert simulation(block, 3, "sglang") is not None


CONTRADICTING: tuple[dict[str, Any], ...] = (
    {"measured": False, "schema_version": None}, {"measured": False, "mean_accept_length": None},
    {"measured": None}, {"schema_version": "2.0"}, {"mean_accept_length": 2.54671},
    {"mean_accept_length": 2.4},
    {"marginal_accept_rates": [0.719104, 0.290066, 0.464183]},  # in another order
    {"marginal_accept_rates": [0.719104, 0.645502, 0.624895]},  # the conditional ones
    {"acceptance_length_histogram": {"1": 1, "2": 1, "3": 1, "4": 1}},
    {"acceptance_length_histogram": {"1": 8611, "2": 7814, "3": 5337, "5": 8891}},
    {"num_speculative_tokens": 2}, {"num_speculative_tokens": 0},
    {"conditional_accept_rates": [1.2, 0.6, 0.6]}, {"verification_method": "block"},
    {"per_category": {"code": {"conditional_accept_rates": [0.5]}}},
    {"per_category": {"code": {}}}, {"per_category": {"code": 2.5}},
)  # fmt: skip


def test_what_contradicts_itself_or_was_not_measured_is_refused(tmp_path: Path) -> None:
    """Rates are shares."""
    for changes in CONTRADICTING:
        with pytest.raises(GoldenError):
            said_of(tmp_path, **changes)


STEPS = st.lists(st.integers(0, 9), min_size=2, max_size=7).filter(any)


@given(drawn=st.lists(st.tuples(STEPS, st.sampled_from("ab")), min_size=1, max_size=4))
def test_a_profile_keeps_rates_k_and_categories(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[list[int], str]]
) -> None:
    columns = max(len(histogram) for histogram, _ in drawn)
    padded = [(*histogram, *[0] * (columns - len(histogram))) for histogram, _ in drawn]
    counted = replay(padded, categories="".join(category for _, category in drawn))
    made = profile_of(golden_of_replay(counted, draft_sha256=None))
    place = tmp_path_factory.getbasetemp() / "profile.json"
    place.write_text(profile_document(made), encoding="utf-8")
    assert read_profile(place) == made
    steps = np.array(padded).sum(0)
    reached = steps[::-1].cumsum()[::-1] / steps.sum()
    assert made.num_draft_tokens == columns - 1
    assert made.rates == pytest.approx(tuple(reached[1:]), abs=1e-6)
    assert made.mean == pytest.approx(reached.sum(), abs=1e-6)
    assert {*(made.per_category or ())} == {category for _, category in drawn}


@pytest.mark.parametrize(
    ("family", "method", "model"),
    [("eagle3-llama", "eagle3", "chain_analytic"), ("dflash", "dflash", "measured_per_k"),
     ("deepseek-mtp", "mtp", "measured_per_k"), ("", None, "measured_per_k")],
)  # fmt: skip
def test_only_chains_hold_for_a_smaller_k(family: str, method: str | None, model: str) -> None:
    counted = golden_of_replay(replay(HISTOGRAMS, family=family), draft_sha256=None)
    found = profile_of(counted)
    assert (found.method, found.accept_length_model) == (method, model)
    of_server = profile_of(dataclasses.replace(counted, method="draft_model"))
    assert of_server.accept_length_model == "chain_analytic"


def test_the_profile_of_a_draft_does_not_travel_to_what_is_made_of_it(tmp_path: Path) -> None:
    draft, made = tiny_eagle3_llama(tmp_path / "draft"), tmp_path / "int4"
    said_of(draft)
    dq.quantize(draft, recipe="int4-channel", out=made)
    assert not (made / "speculation_profile.json").exists()
    said_of(made)
    assert dq.verify(made, against=draft).ok


# ---- settings of load tests


def test_each_engine_gets_the_rates_or_the_mean_that_it_reads() -> None:
    found = profile_of(golden())
    lines: dict[str, str] = {}
    for engine in ("vllm", "dynamo", "sglang", "tensorrt-llm"):
        made = simulation(found, found.num_draft_tokens, engine)
        assert made is not None
        lines[engine], notes = made
        if engine == "sglang":
            assert "--speculative-num-draft-tokens 3 (K + 1)" in notes[0]
    option, config = shlex.split(lines["vllm"])
    assert option == "--speculative-config"
    assert json.loads(config) == {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.6, 0.35],
    }
    assert lines["dynamo"] == "--aic-nextn 2 --aic-nextn-accept-rates 0.6,0.583333"
    method = "SGLANG_SIMULATE_ACC_METHOD=match-expected"
    assert lines["sglang"].split()[:2] == ["SGLANG_SIMULATE_ACC_LEN=1.95", method]
    assert lines["tensorrt-llm"] == "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=0.95"
    seven = simulation(Accepted(marginal_accept_rates=(0.5, 0.25, *[0.0] * 5)), 7, "dynamo")
    assert seven is not None
    assert seven[0] == "--aic-nextn 5 --aic-nextn-accept-rates 0.5,0.5,0,0,0"
    assert "5 of 7 tokens at most" in seven[1][0]


def test_the_command_prints_writes_and_refuses(path: Path, tmp_path: Path) -> None:
    assert main(["golden", str(path), "--for", "sglang", "--category", "a"]) == 0
    profile = str(tmp_path / "speculation_profile.json")
    made = ["golden", str(path), "--for", "profile", "--out", profile]
    assert main(made) == 0
    assert main(["golden", str(path)]) == main(["golden", profile, "--json"]) == 0
    said_of(tmp_path, per_category={"code": {"mean_accept_length": 2.9}})
    assert main(["golden", str(tmp_path)]) == 0
    for words in (
        made,  # it is there
        [*made, "--category", "a"],
        ["golden", str(path), "--category", "c"],
        ["golden", profile, "--for", "dynamo", "--category", "code"],
        ["golden", str(path), "--out", "x"],
    ):
        assert main(words) == 2


def test_whatever_counts_gives_golden_acceptance(tmp_path: Path) -> None:
    """A measurement that is shown, a report or nothing at all, and the candidate's server."""
    out = tmp_path / "g.json"
    golden = ["--golden", str(out)]
    a, b = (losing(drop, name=name) for drop, name in enumerate("ab"))
    few = measurement([[1, 0, 1], [1, 1]], name="shown")
    shown = ["measure", "--show", str(written(tmp_path / "shown", few))]
    assert main([*shown, *golden]) == 0
    assert read_profile(out).acceptance_length_histogram == {1: 1, 2: 4}
    assert [*(read_profile(out).per_category or ())] == ["a", "context 0-1k"]
    assert main([*shown, *golden]) == 2
    (tmp_path / "r.json").write_text(text_of(comparison(categories="ab")), encoding="utf-8")
    assert main(["report", str(tmp_path / "r.json"), *golden, "--overwrite"]) == 0
    assert read_profile(out).draft_checkpoint == {"id": "int4", "tensors_sha256": "2" * 64}
    runs = ["gate", "--measured", *[str(written(tmp_path / one.name, one)) for one in (a, b)]]
    assert main([*runs, *golden, "--overwrite"]) == 0
    assert read_profile(out) == profile_of(golden_of_measurement(b))
    profile = tmp_path / "speculation_profile.json"
    assert main([*runs, "--profile", str(profile)]) == main(["golden", str(profile)]) == 0
    assert read_profile(tmp_path) == read_profile(out)
    for drafts, place in ((["A", "B"], "g.json"), (["A"], str(out))):  # of one draft, into no file
        assert main(["replay", *drafts, "--traces", "T", "--golden", place]) == 2
