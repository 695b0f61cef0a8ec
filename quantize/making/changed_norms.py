"""The norms that a run changes: divided by a power of two, exactly, or learned with the codes."""

from collections.abc import Mapping

import numpy as np

from ..algorithms import FoundCodes
from ..lints.concat import balance_exponent, half_ratios
from ..planning.quantization_plan import Plan
from ..stored.decoded_numbers import floats, read_whole


def balanced_norms(plan: Plan) -> dict[str, int]:
    """The norms that balancing the concat input changes: tensor name -> k, divided by 2^k.

    Reads some rows of the linears behind them; empty where the halves are less than 4 apart.
    """
    if plan.balanced is None:
        return {}
    norm, _ = plan.balanced
    exponent = balance_exponent([ratio.ratio for ratio in half_ratios(plan.draft)])
    return {norm.row.tensor.name: exponent} if exponent else {}


def balance_exponents(plan: Plan, balanced: Mapping[str, int]) -> dict[str, int]:
    """Of balanced norms and of the linears behind them: on-disk module name -> k of 2^k."""
    exponents = {name.removesuffix(".weight"): k for name, k in balanced.items()}
    if plan.balanced is not None and exponents:
        _, linears = plan.balanced
        exponents |= dict.fromkeys((step.row.module for step in linears), *exponents.values())
    return exponents


def learned_norms(
    plan: Plan, found: FoundCodes | None, balanced: Mapping[str, int]
) -> dict[str, float]:
    """The norms that learned: tensor name -> the largest factor by which an element changed.

    An element was multiplied by it or divided, beside what balancing did; 1.0 = nothing changed.
    """
    if found is None:
        return {}
    factors = {}
    for step in plan.learned_norms:
        tensor = step.row.tensor
        source = floats(read_whole(plan.draft.checkpoint, tensor), tensor.dtype).astype(np.float64)
        before = np.abs(source * 2.0 ** -balanced.get(tensor.name, 0))
        after = found.weight(step.row.canonical.removesuffix(".weight")).double().abs().numpy()
        larger, smaller = np.maximum(before, after), np.minimum(before, after)
        moved = larger > 0
        factors[tensor.name] = float(np.max(larger[moved] / smaller[moved], initial=1.0))
    return factors
