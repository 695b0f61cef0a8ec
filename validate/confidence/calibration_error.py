"""How far the survival that a confidence head foretells is off what the target accepts.

The expected calibration error is SGLang's: for each position the survivals of the verify steps are
sorted into 15 bins of equal width; a bin is off by the difference of its mean survival and the
share of its steps in which the token was accepted, and weighs as many steps as it holds. Brier's
score is the mean squared difference of the survival and 1 (accepted) or 0. Both are means over the
positions. Source: SGLang 0.5.23 `benchmark/dspark_sts_fit.py:25`.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .head_calibration import NUM_BINS

_LEAST = 1e-8

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalCounts:
    """Of verify steps, by position and bin. Add them; never average averages.

    Attributes:
        bins: [3, K, 15] steps, the sum of their survivals, and how many of them accepted the token.
        squares: [K] the sum of squared differences.
    """

    bins: Floats
    squares: Floats
    STEPS: ClassVar = 0
    FORETOLD: ClassVar = 1
    ACCEPTED: ClassVar = 2

    @classmethod
    def of(cls, survival: Tensor, accepted: Tensor) -> "SurvivalCounts":
        """Of N verify steps.

        Args:
            survival: [N, K], see `survivals`.
            accepted: [N] draft tokens that the target accepts of all K.
        """
        depths = survival.shape[1]
        foretold = survival.double().clamp(_LEAST, 1 - _LEAST)
        reached = (torch.arange(depths) < accepted[:, None]).double()
        at = (foretold * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        into = (torch.arange(depths) * NUM_BINS + at).flatten()
        sums = [
            torch.bincount(into, weights=values.flatten(), minlength=depths * NUM_BINS)
            for values in (torch.ones_like(reached), foretold, reached)
        ]
        bins = torch.stack(sums).double().view(3, depths, NUM_BINS)
        return cls(bins=bins.numpy(), squares=(foretold - reached).square().sum(0).numpy())


def calibration_errors(bins: Floats) -> Floats:
    """[..., K] of each position, of [..., 3, K, 15] counts; 0 where there is no step."""
    steps, foretold, accepted = np.moveaxis(bins, -3, 0)
    total = np.maximum(steps.sum(-1), 1.0)
    errors: Floats = np.abs(foretold - accepted).sum(-1) / total
    return errors


def brier_scores(bins: Floats, squares: Floats) -> Floats:
    """[..., K] of each position, of counts and of [..., K] sums of squares."""
    scores: Floats = squares / np.maximum(bins[..., SurvivalCounts.STEPS, :, :].sum(-1), 1.0)
    return scores
