"""Counts in, numbers out: acceptance figures and the confidence bound of the gate.

Pure arithmetic. It knows neither drafts nor files, and draws no random number.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy import stats

NGRAM_ORDER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """How many verify steps accepted 0, 1, ... K draft tokens. Add counts; never average averages.

    Attributes:
        histogram: [K + 1] steps by number of accepted draft tokens, the bonus token not counted.
    """

    histogram: tuple[int, ...]

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip(self.histogram, other.histogram, strict=True)
        return AcceptanceCounts(histogram=tuple(a + b for a, b in pairs))

    @property
    def num_draft_tokens(self) -> int:
        """K, proposed in every step."""
        return len(self.histogram) - 1

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Over all steps, without bonus tokens."""
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def num_emitted_tokens(self) -> int:
        """Accepted draft tokens and one bonus token per step."""
        return self.num_steps + self.num_accepted_draft_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps, pooled, in [1, K + 1]; needs at least one step."""
        return 1 + self.num_accepted_draft_tokens / self.num_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens, in [0, 1]; needs at least one step."""
        return self.num_accepted_draft_tokens / (self.num_steps * self.num_draft_tokens)

    @property
    def survival(self) -> tuple[float, ...]:
        """[K] share of all steps that accepted at least j = 1 .. K draft tokens."""
        return tuple(reached / self.num_steps for reached in self._reached()[1:])

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """[K] share of the steps that accepted j - 1 tokens or more which also accepted token j.

        None where no step got that far.
        """
        reached = self._reached()
        return tuple(after / before if before else None for before, after in pairwise(reached))

    def _reached(self) -> list[int]:
        """[K + 1] steps that accepted at least 0 .. K draft tokens."""
        return [sum(self.histogram[j:]) for j in range(len(self.histogram))]


def pooled(counts: Iterable[AcceptanceCounts], num_draft_tokens: int) -> AcceptanceCounts:
    """The sum of counts, zero steps for none."""
    total = AcceptanceCounts(histogram=(0,) * (num_draft_tokens + 1))
    for item in counts:
        total = total + item
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedChange:
    """Relative change of the mean acceptance length from a baseline to a candidate draft.

    Attributes:
        log_ratio: theta = log(AL_candidate / AL_baseline).
        standard_deviation: of the per-prompt influence psi, prompts being the unit of sampling.
        standard_error: standard_deviation / sqrt(num_prompts).
        lower, upper: one-sided bounds of theta, each at `confidence`.
        num_prompts: pairs.
    """

    log_ratio: float
    standard_deviation: float
    standard_error: float
    lower: float
    upper: float
    confidence: float
    num_prompts: int

    @property
    def relative_change(self) -> float:
        """AL_candidate / AL_baseline - 1."""
        return math.expm1(self.log_ratio)


def paired_change(
    baseline: Sequence[AcceptanceCounts],
    candidate: Sequence[AcceptanceCounts],
    *,
    confidence: float,
) -> PairedChange:
    """Compare two drafts on the same prompts.

    With T emitted tokens and R steps per prompt, AL = sum T / sum R; linearised around the means,

        psi_i = T_q,i / mean(T_q) - R_q,i / mean(R_q) - T_b,i / mean(T_b) + R_b,i / mean(R_b)
        SE(theta) = sd(psi) / sqrt(N),   bounds = theta -+ t_{confidence, N - 1} * SE.

    Args:
        baseline: counts per prompt, each with at least one step.
        candidate: counts of the same prompts in the same order.
        confidence: of each one-sided bound, in (0.5, 1).

    Raises:
        ValueError: fewer than two prompts, unequal numbers of prompts, or a prompt without steps.
    """
    count = len(baseline)
    if count < 2 or count != len(candidate):
        raise ValueError(f"expected two or more pairs, got {count} and {len(candidate)}")
    if any(counts.num_steps < 1 for counts in (*baseline, *candidate)):
        raise ValueError("expected at least one verify step in every prompt")
    terms = zip(
        _over_mean([counts.num_emitted_tokens for counts in candidate]),
        _over_mean([counts.num_steps for counts in candidate]),
        _over_mean([counts.num_emitted_tokens for counts in baseline]),
        _over_mean([counts.num_steps for counts in baseline]),
        strict=True,
    )
    influence = [t_q - r_q - t_b + r_b for t_q, r_q, t_b, r_b in terms]
    mean = math.fsum(influence) / count
    deviation = math.sqrt(math.fsum((psi - mean) ** 2 for psi in influence) / (count - 1))
    error = deviation / math.sqrt(count)
    theta = math.log(_mean_length(candidate) / _mean_length(baseline))
    quantile = float(stats.t.ppf(confidence, count - 1))
    return PairedChange(
        log_ratio=theta,
        standard_deviation=deviation,
        standard_error=error,
        lower=theta - quantile * error,
        upper=theta + quantile * error,
        confidence=confidence,
        num_prompts=count,
    )


def required_num_prompts(
    change: PairedChange, *, max_relative_drop: float, power: float
) -> int | None:
    """Prompts with which a draft of this very change would pass with probability `power`.

    N = ((z_confidence + z_power) * sd / (theta - log(1 - max_relative_drop)))^2, rounded up.

    Returns:
        None if the measured change itself is at or beyond the limit: more prompts would not help.
    """
    slack = change.log_ratio - math.log1p(-max_relative_drop)
    if slack <= 0:
        return None
    z = float(stats.norm.ppf(change.confidence) + stats.norm.ppf(power))
    return max(2, math.ceil((z * change.standard_deviation / slack) ** 2))


def repeated_ngram_share(
    continuations: Iterable[Sequence[int]], *, order: int = NGRAM_ORDER
) -> float:
    """Share of n-grams that occurred earlier in the same continuation: loops are easy to draft.

    Args:
        continuations: token ids without the prompts.
        order: tokens per n-gram.

    Returns:
        Pooled over the continuations, in [0, 1); 0 if none is as long as one n-gram.
    """
    total = distinct = 0
    for tokens in continuations:
        ngrams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
        total += len(ngrams)
        distinct += len(set(ngrams))
    return 1 - distinct / total if total else 0.0


def _over_mean(values: Sequence[int]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value / mean for value in values]


def _mean_length(counts: Sequence[AcceptanceCounts]) -> float:
    return sum(c.num_emitted_tokens for c in counts) / sum(c.num_steps for c in counts)
