"""Algorithms that find the quantized values and scales of a linear."""

from collections.abc import Mapping

from ...recipes.errors import PASS_TRACES, BackendError
from ...recipes.schema import Algorithm as Choice
from .algorithm import FoundCodes, InputMoments, Need, RowAlgorithm, Statistics, WeightAlgorithm
from .gptq_rounding import Gptq, Learned
from .nearest import AbsmaxNearest, MseNearest

_ALGORITHMS: Mapping[tuple[str, str], WeightAlgorithm] = {
    ("absmax", "nearest"): AbsmaxNearest(),
    ("mse", "nearest"): MseNearest(),
    ("absmax", "gptq"): Gptq(AbsmaxNearest()),
    ("mse", "gptq"): Gptq(MseNearest()),
    ("absmax", "learned"): Learned(),
    ("mse", "learned"): Learned(),
}
"""Algorithms by the recipe's `scale` and `rounding`."""


def get_algorithm(choice: Choice) -> WeightAlgorithm:
    """The algorithm of a recipe."""
    return _ALGORITHMS[choice.scale, choice.rounding]


def row_algorithm(choice: Choice) -> RowAlgorithm:
    """The algorithm of a recipe, if it finds codes weight by weight."""
    algorithm = get_algorithm(choice)
    if not isinstance(algorithm, RowAlgorithm):
        where = f"rounding: {choice.rounding}"
        raise BackendError(
            where,
            "learned rounding looks at the whole draft and at traces, not at one weight alone",
            fix=PASS_TRACES,
        )
    return algorithm


__all__ = [
    "FoundCodes",
    "InputMoments",
    "Need",
    "RowAlgorithm",
    "Statistics",
    "WeightAlgorithm",
    "get_algorithm",
    "row_algorithm",
]  # fmt: skip
