"""Intervals over prompts and repeats: by hand, at their edges, and by what they cover."""

import math

import numpy as np
import pytest
from draftquant.validate.launch.crossed_intervals import Estimate, Factor, estimate
from scipy import stats


def ratio(above: object, below: object) -> Estimate:
    return estimate([Factor(np.array(above, float), 1), Factor(np.array(below, float), -1)])


def test_by_hand() -> None:
    tokens, seconds = [[10, 20, 30], [10, 20, 30]], [[1, 2, 4], [1, 3, 4]]
    found = ratio(tokens, seconds)
    assert found.value == pytest.approx(120 / 15)
    without_prompt = np.log([100 / 13, 80 / 10, 60 / 7])
    without_repeat = np.log([60 / 8, 60 / 7])
    of_prompts = 2 / 3 * ((without_prompt - without_prompt.mean()) ** 2).sum()
    of_repeats = 1 / 2 * ((without_repeat - without_repeat.mean()) ** 2).sum()
    effective = 15**2 / (2**2 + 5**2 + 8**2)
    half = math.sqrt(
        stats.t.ppf(0.975, effective - 1) ** 2 * of_prompts
        + stats.t.ppf(0.975, 1) ** 2 * of_repeats
    )
    assert found.lower == pytest.approx(8 * math.exp(-half))
    assert found.upper == pytest.approx(8 * math.exp(half))


def test_what_is_equal_everywhere_has_no_width() -> None:
    found = ratio([[2, 4, 6]] * 3, [[1, 2, 3]] * 3)
    assert (found.value, found.lower, found.upper) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ([[1, 2, 3]], [[1, 1, 1]]),  # one repeat
        ([[1], [2]], [[1], [1]]),  # one prompt
        ([[0, 2], [0, 3]], [[1, 1], [1, 1]]),  # one prompt holds all
        ([[0, 0], [2, 3]], [[1, 1], [1, 1]]),  # one repeat does
    ],
)
def test_what_rests_on_one_has_no_interval(above: object, below: object) -> None:
    found = ratio(above, below)
    assert found.value == pytest.approx(np.sum(above) / np.sum(below))
    assert (found.lower, found.upper) == (None, None)
    assert found.times(10).lower is None


def test_a_unit_moves_all_of_it() -> None:
    assert Estimate(value=2, lower=1, upper=4).times(1000) == Estimate(
        value=2000, lower=1000, upper=4000
    )


def served(
    generator: np.random.Generator, rounds: np.ndarray, in_flight: int, speed: float
) -> np.ndarray:
    """Latencies in a loop that is always full: steps are shared, and slower with more in flight."""
    latency, began = np.zeros(len(rounds)), np.zeros(len(rounds))
    waiting, now = list(range(len(rounds)))[::-1], 0.0
    left: dict[int, int] = {}
    while waiting or left:
        while waiting and len(left) < in_flight:
            left[i] = rounds[i := waiting.pop()]
            began[i] = now
            now += speed * 0.01  # a prefill stops all
        now += speed * (0.012 + 0.0004 * len(left)) * math.exp(generator.normal(0, 0.03))
        left = {i: n - 1 for i, n in left.items()}
        for i in [i for i, n in left.items() if not n]:
            latency[i] = now - began[i]
            del left[i]
    return latency


@pytest.mark.parametrize("in_flight", [1, 6])
def test_intervals_cover_the_truth_as_often_as_they_say(in_flight: int) -> None:
    """Of a draft against another; every start of a server is 1 % faster or slower than others."""
    generator = np.random.default_rng(in_flight)
    found = []
    for _ in range(120):
        tokens = generator.integers(20, 80, 24)
        length = np.clip(2.9 + generator.normal(0, 0.33, 24), 1.2, 3.9)
        changed = np.clip(length * np.exp(generator.normal(-0.01, 0.03, 24)), 1.1, 4)
        seconds = [
            np.array([
                served(generator, np.ceil(tokens / a).astype(int), in_flight,
                       speed * math.exp(generator.normal(0, 0.01)))
                for _ in range(3)
            ])
            for a, speed in ((length, 1.12), (changed, 1.10))
        ]  # fmt: skip
        found.append(estimate([Factor(seconds[0], 1), Factor(seconds[1], -1)]))
    truth = math.exp(np.mean([math.log(one.value) for one in found]))
    covered = [one.lower <= truth <= one.upper for one in found]  # type: ignore[operator]
    assert np.mean(covered) >= 0.92
