"""Does a measured static scale do better than the constant 1.0? What FP8 does to the inputs says.

FP8 E4M3 has the same relative precision from 2^-6 to 448 times the scale, sixteen octaves. A scale
matters only where inputs lie outside: above they are clipped, below their precision fades.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...recipes import ActivationFormat
from .chain_ranges import Ranges, of_modules
from .input_range import FP8_MAX, FP8_NORMAL, InputRange
from .input_scales import FP8_PER_TENSOR, stored_scale

SAME_ERROR = 1.1
"""Errors that differ by less than this factor are those of other roundings, not of other scales."""

MIN_HEADROOM = 2.0
"""How far inputs have to stay below the largest code for a constant to be safe on other text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticError:
    """One linear's input under several static scales; errors as in `InputRange.fp8_error`.

    Attributes:
        absmax: the largest input. stored: the scale that `quantize --traces` stores.
        best: the scale of the smallest error.
        stored_error, best_error, one_error: of the two, and of the constant 1.0.
        clipped: inputs lie above what 1.0 can say, or too near.
        faded: share of the inputs' energy below the normal numbers of 1.0.
    """

    absmax: float
    stored: float
    best: float
    stored_error: float
    best_error: float
    one_error: float
    clipped: bool
    faded: float

    @property
    def one_is_enough(self) -> bool:
        """Whether the constant 1.0 is as good as the best scale, and safe."""
        return not self.clipped and self.one_error <= SAME_ERROR * self.best_error


def static_errors(
    ranges: Ranges, activations: ActivationFormat = FP8_PER_TENSOR
) -> Mapping[str, StaticError]:
    """Of every module, over all its steps and halves and those that engines fuse with it.

    Args:
        ranges: measured along the chain.
        activations: static FP8, one scale per tensor.
    """
    by_module = of_modules(ranges)
    errors = {one: _error(one, activations) for one in set(by_module.values())}
    return {module: errors[one] for module, one in by_module.items()}


def _error(found: InputRange, activations: ActivationFormat) -> StaticError:
    stored, best = stored_scale(found.absmax, activations), found.best_fp8_scale()
    return StaticError(
        absmax=found.absmax,
        stored=stored,
        best=best,
        stored_error=found.fp8_error(stored),
        best_error=found.fp8_error(best),
        one_error=found.fp8_error(1.0),
        clipped=found.absmax * MIN_HEADROOM > FP8_MAX,
        faded=found.share_below(FP8_NORMAL),
    )
