"""Simulated traffic of a live draft for `bench_watch`: golden's own requests, drawn again.

A request keeps the verify steps that were counted of its prompt, in a random order, so that steps
of one request are as alike as they were. Several requests are in flight: their steps alternate. A
loss rejects each accepted draft token, and those behind it, by a coin of its own.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from ...validate.golden.golden import Golden, GoldenPrompt

Counts = NDArray[np.int64]
_ORDERS = 16
"""Random orders of the verify steps of a prompt, of which each request takes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests like those of golden acceptance.

    Attributes:
        golden: whose prompts are the population.
        in_flight: requests at a time.
        steps: accepted tokens of every verify step, of all orders of all prompts one after the
            other. begins, lengths: [prompts x orders] of each order there.
    """

    golden: Golden
    in_flight: int
    steps: NDArray[np.uint8] = field(repr=False)
    begins: Counts = field(repr=False)
    lengths: Counts = field(repr=False)

    @classmethod
    def of(cls, golden: Golden, in_flight: int = 32) -> "Traffic":
        """Of the prompts of golden acceptance, whose counts are whole."""
        rng, orders = np.random.default_rng(0), []
        for one in golden.prompts:
            counts = np.asarray(one.histogram, dtype=np.int64)
            steps = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
            orders += [rng.permutation(steps) for _ in range(_ORDERS)]
        lengths = np.array([len(one) for one in orders])
        return cls(
            golden=golden,
            in_flight=in_flight,
            steps=np.concatenate(orders),
            begins=np.cumsum(lengths) - lengths,
            lengths=lengths,
        )

    def sample(self, rng: np.random.Generator, prompts: int) -> list[GoldenPrompt]:
        """Golden acceptance of other prompts of the population, each one a cluster of its own."""
        drawn = rng.integers(len(self.golden.prompts), size=prompts)
        return [
            GoldenPrompt(category="", cluster=i, histogram=self.golden.prompts[j].histogram)
            for i, j in enumerate(drawn)
        ]

    def kept(self, mean: float) -> float:
        """Probability with which each accepted token stays accepted, so that this is the mean.

        Args:
            mean: acceptance length, at most golden's.
        """
        accepted = np.array(self.golden.all.accepted_at) / self.golden.all.verify_steps
        powers = np.arange(1, len(accepted) + 1)
        if mean >= 1 + accepted.sum():
            return 1.0
        return float(brentq(lambda share: 1 + accepted @ share**powers - mean, 0.0, 1.0))

    def readings(
        self, rng: np.random.Generator, requests: int, readings: int, kept: float = 1.0
    ) -> Counts:
        """[readings, 2] verify steps and accepted tokens of so many requests, in equal parts.

        Args:
            rng: draws them.
            requests: in all.
            readings: of them.
            kept: see there; 1 = nothing is lost.
        """
        drawn = rng.integers(len(self.begins), size=requests)
        lengths = self.lengths[drawn]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(self.begins[drawn] - ends + lengths, lengths)
        accepted = self.steps[places]
        if kept < 1:
            accepted = np.minimum(accepted, rng.geometric(1 - kept, size=len(accepted)) - 1)
        ticks = len(accepted) // self.in_flight
        lanes = accepted[: ticks * self.in_flight].reshape(self.in_flight, ticks)
        of_tick = lanes.sum(axis=0, dtype=np.int64)
        begins = np.arange(readings) * ticks // readings
        steps = np.diff(np.append(begins, ticks)) * self.in_flight
        return np.stack([steps, np.add.reduceat(of_tick, begins)], axis=1)
