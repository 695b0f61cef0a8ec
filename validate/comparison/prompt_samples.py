"""Acceptance lengths of parts of the prompts, and what each prompt contributes to their error.

A category is compared from `MIN_PROMPTS` distinct prompts on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..counting.jackknife import Floats, contributions, sums_without
from ..errors import CompareError
from .counted_drafts import CountedDrafts
from .simultaneous import Estimate

ALL_PROMPTS = "all prompts"
TRAFFIC = "your traffic"
MIN_PROMPTS = 10
"""Of a category: the bounds of fewer say little, and cost all others."""
_SUM_WITHIN = 0.005  # shares of traffic are written with two digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The prompts of a scope: all of them, the traffic, or a category.

    Attributes:
        strata: [N] number of the stratum that a prompt is in, -1 = not in the scope.
        weights: [S] share of the output tokens of each stratum, together 1.
        log_lengths: [D] logarithm of the acceptance length of each draft.
        contributions: [D, N] jackknife contributions to it.
    """

    name: str
    is_whole: bool
    strata: Floats
    weights: Floats
    steps: Floats
    log_lengths: Floats
    contributions: Floats

    @property
    def num_prompts(self) -> int:
        """Distinct ones."""
        return int((self.strata >= 0).sum())

    @property
    def is_compared(self) -> bool:
        """Whether they are enough."""
        return self.is_whole or self.num_prompts >= MIN_PROMPTS

    def change(self, one: int, other: int) -> Estimate:
        """From a draft to another; degrees of freedom as in `paired_change`, less the strata."""
        shares = np.zeros(len(self.strata))
        for stratum, weight in enumerate(self.weights):
            inside = self.strata == stratum
            shares[inside] = weight * self.steps[one, inside] / self.steps[one, inside].sum()
        effective = 1 / float((shares**2).sum())
        return Estimate(
            value=float(self.log_lengths[other] - self.log_lengths[one]),
            contributions=self.contributions[other] - self.contributions[one],
            degrees=max(1.0, effective - len(self.weights)),
        )


def samples_of(drafts: CountedDrafts, traffic: Mapping[str, float]) -> list[Sample]:
    """The whole first, then every category by name where there are several.

    Args:
        traffic: share of the output tokens by category; empty = prompts as they are, pooled.

    Raises:
        CompareError: the traffic does not fit the prompts.
    """
    categories = np.array(drafts.categories)
    names = sorted(set(drafts.categories))
    if traffic:
        _check_traffic(traffic, drafts)
        strata = np.full(len(categories), -1)
        for number, name in enumerate(traffic):
            strata[categories == name] = number
        weights = np.array(list(traffic.values())) / sum(traffic.values())
        found = [_sample(drafts, TRAFFIC, strata, weights, is_whole=True)]
    else:
        strata = np.zeros(len(categories), dtype=int)
        found = [_sample(drafts, ALL_PROMPTS, strata, np.ones(1), is_whole=True)]
    if len(names) > 1:
        found += [
            _sample(drafts, name, np.where(categories == name, 0, -1), np.ones(1), is_whole=False)
            for name in names
        ]
    return found


def _sample(
    drafts: CountedDrafts, name: str, strata: Floats, weights: Floats, *, is_whole: bool
) -> Sample:
    """Acceptance lengths and what each prompt contributes to their variance.

    With w the shares of output tokens, 1 / AL = sum over strata of w R / T: tokens are what traffic
    has whatever the draft, steps are not. For one stratum AL = T / R. L = log AL; L_-i is the same
    without prompt i; in a stratum of n prompts it contributes sqrt((n - 1) / n) (L_-i - mean L_-i).
    """
    tokens, steps = drafts.tokens, drafts.steps
    inside = [strata == stratum for stratum in range(len(weights))]
    ratio = np.stack([steps[:, at].sum(1) / tokens[:, at].sum(1) for at in inside], axis=1)
    inverse = ratio @ weights
    of_each = np.zeros_like(tokens)
    for stratum, at in enumerate(inside):
        if at.sum() < 2:
            continue  # a category of one prompt has no spread, and is not compared
        left = sums_without(steps[:, at]) / sums_without(tokens[:, at])
        without = -np.log(inverse[:, None] + weights[stratum] * (left - ratio[:, [stratum]]))
        of_each[:, at] = contributions(without)
    return Sample(
        name=name,
        is_whole=is_whole,
        strata=strata,
        weights=weights,
        steps=steps,
        log_lengths=-np.log(inverse),
        contributions=of_each,
    )


def _check_traffic(traffic: Mapping[str, float], drafts: CountedDrafts) -> None:
    for name, share in traffic.items():
        number = drafts.categories.count(name)
        if number < 2:
            known = ", ".join(sorted(set(drafts.categories)))
            raise CompareError(
                "--traffic",
                f"{name!r} has {number} distinct prompts, expected two or more",
                fix=f"name categories of the prompts: {known}",
            )
        if not 0 < share <= 1:
            raise CompareError(
                "--traffic",
                f"{name!r}: expected a share in (0, 1], got {share:g}",
                fix="for example chat=0.7,code=0.3",
            )
    total = sum(traffic.values())
    if abs(total - 1) > _SUM_WITHIN:
        raise CompareError(
            "--traffic",
            f"expected shares that add up to 1, got {total:g}",
            fix="for example chat=0.7,code=0.3",
        )
