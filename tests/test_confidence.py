"""Rules of `--confidence`, temperatures and calibration errors: held against the engines' own code.

`engines/confidence.json` holds what SGLang 0.5.23 and vLLM 0.33 answered (`engines/confidence.py`);
that replay's verify steps are those of decoding is in test_block_replay.py.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftquant.validate.confidence.calibration_error import (
    SurvivalCounts,
    brier_scores,
    calibration_errors,
)
from draftquant.validate.confidence.head_calibration import NUM_BINS, BoundedFigure
from draftquant.validate.confidence.length_rules import length_rule
from draftquant.validate.confidence.shared_scaling import shared_scaling
from draftquant.validate.confidence.shortened import ShortenedCounts, shortened_rounds
from draftquant.validate.confidence.survival import confidences, survivals
from draftquant.validate.confidence.temperatures import Temperatures, fitted, read_temperatures
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.calibration_change import (
    calibration_change,
    head_calibration,
)
from draftquant.validate.counting.draft_replay import PromptReplay
from draftquant.validate.errors import ReplayError
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent / "engines"))  # its modules stand alone

from confidence import ADDITIVE_TABLE, COSTS, OUT, PLAIN_TABLE

ANSWERS = json.loads(OUT.read_text(encoding="utf-8"))


def file_of(folder: Path, value: object) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def lengths(rule: str, steps: Tensor) -> list[int]:
    """Of verify step after verify step of one request."""
    found = length_rule(rule)
    return [found.length(list(steps[: i + 1])) for i in range(len(steps))]


@pytest.mark.parametrize(
    ("engine", "table", "answer"),
    [
        ("sglang", PLAIN_TABLE, ANSWERS["sglang"]["plain"]),
        ("sglang", ADDITIVE_TABLE, ANSWERS["sglang"]["additive"]),
        ("vllm", COSTS, ANSWERS["vllm"]["lengths"]),
    ],
)
def test_lengths_are_those_of_the_engines_own_code(
    engine: str, table: dict[str, Any], answer: list[int], tmp_path: Path
) -> None:
    steps = confidences(torch.tensor(ANSWERS["sglang"]["logits"]) / 1000)
    assert lengths(f"{engine}:{file_of(tmp_path, table)}", steps) == answer
    assert len(set(answer)) > 3


def test_a_table_with_one_probe_makes_sglang_verify_all(tmp_path: Path) -> None:
    table = {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 9}
    steps = torch.full((3, 4), 0.01)
    assert lengths(f"sglang:{file_of(tmp_path, table)}", steps) == [4, 4, 4]


def test_a_threshold_cuts_by_survival_and_not_by_confidence() -> None:
    steps = torch.tensor([[0.9, 0.8, 0.7, 0.9], [0.4, 1.0, 1.0, 1.0]])
    assert lengths("0.5", steps) == [3, 0]
    assert lengths("0", steps) == [4, 4]
    assert lengths("1", steps) == [0, 0]
    found = shortened_rounds([4, 2, 0, 1, 0], steps[0].expand(5, -1), length_rule("0.5"))
    assert [(one.row, one.verified, one.accepted) for one in found] == [(0, 3, 3), (4, 3, 0)]
    counts = ShortenedCounts.of(found)
    assert (counts.num_steps, counts.num_verified, counts.num_accepted) == (2, 6, 3)
    assert (counts.mean_acceptance_length, counts.num_target_tokens) == (2.5, 8)


@pytest.mark.parametrize(
    ("rule", "what", "fix"),
    [
        ("vllm", "milliseconds that it measures when it starts", "vllm:COSTS.json"),
        ("sglang", "by its table of costs", "sglang:TABLE.json"),
        ("speculative-adaptive", "a moving average over all requests", "-k"),
        ("tensorrt", "expected a survival from 0 to 1", "--confidence 0.3"),
        ("1.5", "expected a survival from 0 to 1", "--confidence 0.3"),
        ("nan", "expected a survival from 0 to 1", "--confidence 0.3"),
        (
            "sglang:absent.json",
            "absent.json: cannot be read: No such file or directory",
            "--speculative-dspark-sps-table-path",
        ),
    ],
)
def test_what_is_no_rule_is_refused_by_name(rule: str, what: str, fix: str) -> None:
    with pytest.raises(ReplayError) as caught:
        length_rule(rule)
    assert what in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "table", "what"),
    [
        ("sglang", {**PLAIN_TABLE, "sample_batch_tokens": [1, 2, 2, 5, 7]}, "strictly increasing"),
        ("sglang", {**PLAIN_TABLE, "sample_steps_per_sec": [1.0]}, "expected 5 numbers"),
        ("sglang", {**PLAIN_TABLE, "max_batch_tokens": 3}, "at least 7"),
        ("sglang", {**PLAIN_TABLE, "sample_steps_per_sec": [5, 4, 3, 2, 0]}, "numbers above 0"),
        (
            "sglang",
            {
                **PLAIN_TABLE,
                "sample_batch_tokens": [1, 2, 3, 5, 2**63],
                "max_batch_tokens": 2**63,
            },
            "below 2",
        ),
        ("sglang", {**ADDITIVE_TABLE, "bias_seconds": 0.0}, "more than 0"),
        ("sglang", {**ADDITIVE_TABLE, "theta_seconds": [1.0]}, "expected 3 numbers"),
        ("sglang", {**ADDITIVE_TABLE, "theta_seconds": [1, 1, -9]}, "steps of more than 0 seconds"),
        ("vllm", {**COSTS, "draft_ms": -1}, "at least 0"),
        ("vllm", {**COSTS, "verify_ms": [1.0, 0.0]}, "above 0"),
        ("vllm", PLAIN_TABLE, "is no table of costs"),
    ],
)
def test_tables_that_the_engine_would_not_take(
    engine: str, table: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ReplayError, match=what):
        length_rule(f"{engine}:{file_of(tmp_path, table)}")


def test_costs_of_too_few_tokens(tmp_path: Path) -> None:
    rule = length_rule(f"vllm:{file_of(tmp_path, {**COSTS, 'verify_ms': [1.0, 1.5]})}")
    with pytest.raises(ReplayError, match="of 1 to 2 tokens, but a step verifies up to 4"):
        rule.length([torch.ones(3)])


def test_the_fit_is_that_of_sglang(tmp_path: Path) -> None:
    fit = ANSWERS["sglang"]["fit"]
    found = fitted(torch.tensor(fit["logits"]) / 1000, torch.tensor(fit["accepted"]), "random")
    assert found.temperatures == tuple(fit["temperatures"])
    assert found.ece_before == pytest.approx(fit["ece_before"], rel=1e-9)
    assert found.ece_after == pytest.approx(fit["ece_after"], rel=1e-9)
    assert sum(found.ece_after) < sum(found.ece_before)
    path = tmp_path / "sts.json"
    path.write_text(found.text(), encoding="utf-8")
    assert read_temperatures(path, 6) == found
    keys = {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert json.loads(found.text()).keys() == keys | {"fitted_on"}  # which SGLang passes over


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (Temperatures(temperatures=(1.0, 2.0)).text(), "temperatures for K = 2, but K = 3"),
        (Temperatures(temperatures=(1.0, 0.0, 2.0)).text(), "expected more than 0, got 0"),
        ("{}", "is no STS file"),
    ],
)
def test_files_of_temperatures_that_sglang_would_not_take(
    text: str, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "sts.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReplayError, match=what):
        read_temperatures(path, 3)


def test_temperatures_divide_the_logits() -> None:
    logits = torch.tensor([[1.0, -2.0]])
    by_hand = [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(4.0))]
    assert confidences(logits, (2.0, 0.5))[0].tolist() == pytest.approx(by_hand)
    assert survivals(logits, (2.0, 0.5))[0].tolist() == pytest.approx(
        [by_hand[0], by_hand[0] * by_hand[1]]
    )


def test_calibration_error_by_hand() -> None:
    """Two positions: bins 0.80 to 0.87 and 0.40 to 0.47 of the first, one of the second."""
    survival = torch.tensor([[0.85, 0.2], [0.83, 0.2], [0.45, 0.2], [0.85, 0.2]])
    counts = SurvivalCounts.of(survival, torch.tensor([2, 1, 0, 0]))
    first = (abs(0.85 + 0.83 + 0.85 - 2) + 0.45) / 4
    assert calibration_errors(counts.bins).tolist() == pytest.approx([first, abs(0.8 - 1) / 4])
    squares = [(0.15**2 + 0.17**2 + 0.45**2 + 0.85**2) / 4, (0.8**2 + 3 * 0.2**2) / 4]
    assert brier_scores(counts.bins, counts.squares).tolist() == pytest.approx(squares)
    assert counts.bins.shape == (3, 2, NUM_BINS)


def test_one_scale_and_one_shift_are_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    true = 1.5 * torch.randn(20000, 3, generator=generator, dtype=torch.float64)
    drawn = torch.rand(20000, 3, generator=generator) < true.sigmoid()
    accepted = drawn.long().cumprod(1).sum(1)
    found = shared_scaling((true - 0.4) / 0.8, accepted)
    # Standard errors are below 0.015 each: 35,000 tokens, each of information 0.1 or more.
    assert found.scale == pytest.approx(0.8, abs=0.05)
    assert found.shift == pytest.approx(0.4, abs=0.05)
    assert sum(found.ece_after) < sum(found.ece_before) / 3
    far = shared_scaling(12 * true, accepted)  # where a plain Newton step goes astray
    assert (12 * far.scale, far.shift) == pytest.approx((1, 0), abs=0.05)
    every = shared_scaling(torch.zeros(5, 2), torch.full((5,), 2))
    assert math.isfinite(every.shift)
    assert every.shift > 1


def prompts_of(survival: Tensor, accepted: Tensor, groups: int) -> list[PromptReplay]:
    """As if each prompt had an equal share of the verify steps, the last one none."""
    parts = zip(survival.chunk(groups), accepted.chunk(groups), strict=True)
    empty = (survival[:0], accepted[:0])
    return [
        PromptReplay(
            id=f"p{i}",
            category="",
            prompt_sha256=f"{i}",
            counts=(counts := AcceptanceCounts.of(b.tolist(), survival.shape[1])),
            every_position=counts,
            survival=SurvivalCounts.of(a, b),
        )
        for i, (a, b) in enumerate([*parts, empty])
    ]


def made(offset: float, seed: int, steps: int = 1200) -> tuple[Tensor, Tensor]:
    """Survivals of a head whose logits are off by an offset, and what was accepted."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, 3, generator=generator)
    drawn = torch.rand(steps, 3, generator=generator) < logits.sigmoid()
    return survivals(logits + offset), drawn.long().cumprod(1).sum(1)


def test_a_head_that_is_off_is_worse_and_one_that_differs_by_chance_is_not() -> None:
    good, same, worse = (prompts_of(*made(offset, seed), 40)
                         for offset, seed in ((0.0, 1), (0.0, 2), (0.7, 1)))  # fmt: skip
    found = calibration_change(good, worse, 0.95)
    assert found.is_worse
    assert found.num_clusters == 40
    assert found.calibration_error_change.lower > 0.03
    assert found.brier_score_change.lower > 0
    assert found.baseline == head_calibration(good, 0.95)
    nothing = calibration_change(good, good, 0.95)
    assert nothing.calibration_error_change == BoundedFigure(estimate=0.0, lower=0.0, upper=0.0)
    assert not nothing.is_worse
    by_chance = calibration_change(good, same, 0.95)
    change = by_chance.calibration_error_change
    assert change.lower < 0 < change.upper
    assert not by_chance.is_worse


def test_bounds_of_the_brier_score_are_those_of_a_mean() -> None:
    """With equal steps a prompt its score is a mean of means, with Student's t bounds."""
    survival, accepted = made(0.0, 3, steps=600)
    found = head_calibration(prompts_of(survival, accepted, 20), 0.95).brier_score
    reached = (torch.arange(3) < accepted[:, None]).double()
    means = (survival - reached).square().mean(1).view(20, 30).mean(1).numpy()
    error = 1.7291328115213678 * means.std(ddof=1) / math.sqrt(20)  # t of 19 degrees at 95 %
    assert found.estimate == pytest.approx(means.mean())
    assert found.upper - found.estimate == pytest.approx(error)
    assert found.estimate - found.lower == pytest.approx(error)


def test_clusters_are_counted_as_one() -> None:
    survival, accepted = made(0.0, 4, steps=200)
    apart = prompts_of(survival, accepted, 10)
    together = [
        PromptReplay(
            id=one.id,
            category="",
            prompt_sha256=one.prompt_sha256,
            counts=one.counts,
            every_position=one.every_position,
            survival=one.survival,
            cluster=f"{i // 2}",
        )
        for i, one in enumerate(apart)
    ]
    found = calibration_change(together, together, 0.95)
    assert found.num_clusters == 5
    both = (head_calibration(apart, 0.95), head_calibration(together, 0.95))
    assert both[0].calibration_error.estimate == pytest.approx(both[1].calibration_error.estimate)
    assert both[0].by_position == pytest.approx(both[1].by_position)
    assert np.isfinite(both[1].calibration_error.upper)
