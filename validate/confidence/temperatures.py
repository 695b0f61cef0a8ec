"""Sequential temperature scaling (STS): a temperature for each position of the confidence head.

SGLang 0.5.23 alone reads it (`--speculative-dspark-confidence-sts-path`). The fit is that of its
`benchmark/dspark_sts_fit.py`: position after position, of 41 temperatures between 0.1 and 10 the
one with the smallest expected calibration error of the survival so far, the smaller of equal ones.
The file is what its `DSparkStsCalibration` reads, which passes over the prompts that we name
besides. No proposal changes by it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...recipes.errors import reason
from ...recipes.regular_file import read_text
from ...recipes.seen_prompts import SeenPrompts
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import ReplayError
from .calibration_error import SurvivalCounts, calibration_errors

OPTION = "--sts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperatures:
    """The keys of SGLang's file.

    Attributes:
        temperatures: [K] above 0. dataset: what they were fitted on, in words.
        num_samples: verify steps. ece_before, ece_after: [K] expected calibration errors of the
            survival on them, without and with the temperatures.
        fitted_on: the prompts of each trace folder; none in a file of SGLang's.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    fitted_on: tuple[SeenPrompts, ...] = ()

    def text(self) -> str:
        """As SGLang reads it."""
        return json.dumps(asdict(self)) + "\n"


def read_temperatures(path: Path, num_draft_tokens: int) -> Temperatures:
    """Read an STS file.

    Args:
        path: of `calibrate --sts`, or of SGLang's own fit.
        num_draft_tokens: K, for which it has to be made; SGLang refuses another.

    Raises:
        ReplayError: it cannot be read, or SGLang would refuse it.
    """
    fix = f"give what 'draftquant calibrate {OPTION}' wrote for this number of draft tokens"
    try:
        found: Temperatures = decode(Temperatures, parse_object(read_text(path)))
    except OSError as exc:
        raise ReplayError(path, f"cannot be read: {reason(exc)}", fix=fix) from exc
    except JsonProblem as exc:
        raise ReplayError(path, f"is no STS file: {exc}", fix=fix) from exc
    if len(found.temperatures) != num_draft_tokens:
        raise ReplayError(
            path,
            f"holds temperatures for K = {len(found.temperatures)}, but K = {num_draft_tokens}",
            fix=fix,
        )
    if min(found.temperatures) <= 0:
        low = min(found.temperatures)
        raise ReplayError(path, f"temperatures: expected more than 0, got {low:g}", fix=fix)
    return found


def fitted(
    logits: Tensor, accepted: Tensor, dataset: str, fitted_on: Sequence[SeenPrompts] = ()
) -> Temperatures:
    """Fit temperatures.

    Args:
        logits: [N, K] of the confidence head at N verify steps, one at least.
        accepted: [N] draft tokens that the target accepts of all K.
        dataset: for the file.
        fitted_on: their prompts, for the file.
    """
    grid = torch.logspace(math.log10(0.1), math.log10(10.0), steps=41).double().tolist()
    logits = logits.double()
    chosen: list[float] = []
    before: list[float] = []
    after: list[float] = []
    plain = survival = logits.new_ones(len(logits))
    for position in range(logits.shape[1]):
        own = logits[:, position]
        plain = plain * own.sigmoid()
        before.append(_error(plain, accepted > position))
        tried = [survival * (own / temperature).sigmoid() for temperature in grid]
        errors = [_error(one, accepted > position) for one in tried]
        best = errors.index(min(errors))
        chosen.append(grid[best])
        after.append(errors[best])
        survival = tried[best]
    return Temperatures(
        temperatures=tuple(chosen),
        dataset=dataset,
        num_samples=len(logits),
        ece_before=tuple(before),
        ece_after=tuple(after),
        fitted_on=tuple(fitted_on),
    )


def _error(survival: Tensor, accepted: Tensor) -> float:
    """The expected calibration error of one position, of [N] each."""
    counts = SurvivalCounts.of(survival[:, None], accepted.long())
    return float(calibration_errors(counts.bins)[0])
