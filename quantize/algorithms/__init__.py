"""Algorithms that find quantized values and scales of a linear. One module each, behind `base`."""

from collections.abc import Mapping

from ...recipes.algorithm import Algorithm as Choice
from ..errors import PASS_TRACES, BackendError
from .absmax_nearest import AbsmaxNearest
from .algorithm import Algorithm, FoundCodes, Need, RowAlgorithm, Statistics
from .gptq_rounding import Gptq
from .input_moments import InputMoments
from .learned_rounding import Learned
from .mse_nearest import MseNearest

_ALGORITHMS: Mapping[tuple[str, str], Algorithm] = {
    ("absmax", "nearest"): AbsmaxNearest(),
    ("mse", "nearest"): MseNearest(),
    ("absmax", "gptq"): Gptq(AbsmaxNearest()),
    ("mse", "gptq"): Gptq(MseNearest()),
    ("absmax", "learned"): Learned(),
    ("mse", "learned"): Learned(),
}
"""By the recipe's `scale` and `rounding`."""


def get_algorithm(choice: Choice) -> Algorithm:
    """The algorithm of a recipe."""
    return _ALGORITHMS[choice.scale, choice.rounding]


def row_algorithm(choice: Choice) -> RowAlgorithm:
    """The algorithm of a recipe, where it finds codes weight by weight.

    Raises:
        BackendError: it does not.
    """
    algorithm = get_algorithm(choice)
    if not isinstance(algorithm, RowAlgorithm):
        raise BackendError(
            f"rounding: {choice.rounding}",
            "learned rounding looks at the whole draft and at traces, not at one weight alone",
            fix=PASS_TRACES,
        )
    return algorithm


__all__ = [
    "Algorithm",
    "FoundCodes",
    "InputMoments",
    "Need",
    "RowAlgorithm",
    "Statistics",
    "get_algorithm",
    "row_algorithm",
]
