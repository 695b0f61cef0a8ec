"""`canary`: the evidence is fair at the limit, and the verb with two servers and a state."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from counting_server import counting, vllm_page
from draftquant.scripts.cli import main
from draftquant.validate.errors import GoldenError
from draftquant.validate.golden.golden_file import golden_document
from draftquant.validate.golden.golden_sources import golden_of_replay
from draftquant.validate.monitoring.canary import Comparison, Rule
from handmade_replays import replay
from test_watch import HISTOGRAMS, _as_golden, golden

RULE = Rule.of(golden(), max_drop=0.01, confidence=0.95)


def compared(*blocks: tuple[tuple[float, float], tuple[float, float]]) -> Comparison:
    """Baseline and candidate of each block: verify steps and accepted tokens."""
    found = Comparison()
    for theirs, ours in blocks:
        found = RULE.block(
            dataclasses.replace(
                found,
                baseline=found.baseline.counted(*theirs),
                candidate=found.candidate.counted(*ours),
            )
        )
    return found


def arm(steps: int, change: float = 0.0) -> tuple[float, float]:
    """Verify steps and accepted tokens with golden's mean, or a change of it."""
    return steps, (golden().all.mean_acceptance_length * (1 + change) - 1) * steps


def test_the_evidence_is_fair_where_the_candidate_lost_the_limit() -> None:
    """E[exp(s S - s^2 V / 2)] = 1 of normal S with variance V; the e-process is their mean."""
    rng, information = np.random.default_rng(0), 1000.0
    found = []
    for weighted in rng.normal(0, math.sqrt(information), 1000):
        after = dataclasses.replace(Comparison(), weighted=weighted, information=information)
        found.append(math.exp(RULE.verdict(after)[1]))
    assert np.mean(found) == pytest.approx(1, abs=4 * np.std(found) / 1000**0.5)
    assert np.std(found) > 0.1


def test_a_block_weighs_as_much_as_it_knows() -> None:
    """V = 1 / variance of D, with 0.99 of the baseline's mean in D."""
    found = compared((arm(1000), arm(500, -0.01)))
    assert found.information == pytest.approx(1 / (RULE.variance * (1 / 500 + 0.99**2 / 1000)))
    assert found.weighted == pytest.approx(0, abs=1e-6 * found.information)
    assert compared((arm(1000), arm(10))).blocks == 0  # less than four requests of one server
    assert RULE.judge(found).change == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.0, "PASS"), (-0.01, "INCONCLUSIVE"), (-0.05, "FAIL")]
)
def test_verdicts(change: float, verdict: str) -> None:
    judged = RULE.judge(compared(*[(arm(50_000), arm(50_000, change))] * 4))
    assert judged.verdict == verdict
    assert judged.change == pytest.approx(change, abs=1e-9)
    assert judged.low is not None
    assert judged.high is not None
    assert judged.low < change < judged.high
    assert (judged.low > -0.01, judged.high < -0.01) == (verdict == "PASS", verdict == "FAIL")


def test_blocks_that_differ_by_more_than_requests_do_weigh_less() -> None:
    alike = compared(*[(arm(50_000), arm(50_000))] * 4)
    swings = compared(*[(arm(50_000), arm(50_000, way)) for way in (0.1, -0.1) * 2])
    assert alike.dispersion == 1
    assert swings.dispersion > 10
    assert RULE.judge(swings).verdict == "INCONCLUSIVE"


def test_no_verdict_before_thirty_requests() -> None:
    few = 29 * RULE.request_steps
    assert RULE.judge(compared((arm(round(few)), arm(round(few), -0.9)))).verdict == "INCONCLUSIVE"


def test_golden_of_few_prompts_says_too_little() -> None:
    few = golden_of_replay(replay(HISTOGRAMS[:29]), draft_sha256=None)
    with pytest.raises(GoldenError, match="expected 30 prompts or more that differ, got 29"):
        Rule.of(few, max_drop=0.01, confidence=0.95)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "G.json"
    path.write_text(golden_document(golden()), encoding="utf-8")
    return path


def _canary(file: Path, baseline: str, candidate: str, *words: str) -> int:
    servers = ["--server", baseline, "--candidate", candidate, "--golden", str(file)]
    return main(["canary", *servers, "--engine", "vllm", "--every", "0.001", *words])


BEGIN = vllm_page(0, 0, 0)
MANY = vllm_page(*_as_golden(200_000))
ALIKE = vllm_page(*_as_golden(199_000))
LIMIT = vllm_page(*_as_golden(200_000, -0.01))
LOST = vllm_page(*_as_golden(200_000, -0.05))


@pytest.mark.parametrize(
    ("page", "code", "outcome"),
    [(ALIKE, 0, "PASS"), (LOST, 1, "FAIL"), (LIMIT, 3, "INCONCLUSIVE")],
)
def test_the_command_ends_with_its_verdict(
    file: Path, page: str, code: int, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(BEGIN, MANY) as baseline, counting(BEGIN, page) as candidate:
        assert (
            _canary(file, baseline.url, candidate.url, "--for", "0.3", "--every", "0.1", "--json")
            == code
        )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["outcome"] == outcome
    assert lines[1]["baseline"]["verify_steps"] == 200_000


def test_a_canary_goes_on_from_its_state_and_keeps_its_verdict(file: Path, tmp_path: Path) -> None:
    words = ("--once", "--state", str(tmp_path / "c.json"), "--quiet")
    with counting(BEGIN, LOST) as candidate, counting(BEGIN, MANY) as baseline:
        assert [_canary(file, baseline.url, candidate.url, *words) for _ in range(3)] == [3, 1, 1]
        other = ("--max-drop", "2%")
        assert _canary(file, baseline.url, candidate.url, *words, *other) == 2


def test_a_reading_that_is_missed_and_a_restart_are_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = (BEGIN, vllm_page(*_as_golden(1000)), "<html>", LOST)
    again = (BEGIN, vllm_page(*_as_golden(150_000)), vllm_page(*_as_golden(50_000)), MANY)
    with counting(*again) as baseline, counting(*pages) as candidate:
        assert _canary(file, baseline.url, candidate.url, "--for", "5") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no reading" in said
    assert "counts from 0 again" in said


@pytest.mark.parametrize(
    ("page", "words", "said"),
    [
        (vllm_page(9, 1), [], "K = 1 tokens per verify step, and"),
        ("vllm:generation_tokens_total 3\n", [], "has no counter vllm:spec_decode_num_drafts"),
        (BEGIN, ["--once"], "needs --state"),
        (BEGIN, ["--confidence", "0.2"], "expected"),
    ],
)
def test_what_cannot_be_compared_is_named(
    file: Path, page: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(vllm_page(9, 1, 1)) as baseline, counting(page) as candidate:
        assert _canary(file, baseline.url, candidate.url, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_one_server_is_no_canary(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://127.0.0.1:9"
    assert _canary(file, url, f"{url}/") == 2
    assert "is the same server as --server" in " ".join(capsys.readouterr().err.split())
