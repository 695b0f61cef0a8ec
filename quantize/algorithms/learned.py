"""Learned rounding: calibration finds the codes of all linears together, on the draft's own output.

What is here says for which formats; the learning itself knows drafts and traces, and lies above.
"""

from torch import Tensor

from ...recipes.formats import FEW_BITS
from ...recipes.schema import RoundingChoice, WeightFormat
from ..errors import BackendError
from ..numerics.quantized_weight import QuantizedWeight
from .base import Need
from .moments import InputMoments


class Learned:
    """Codes, and scales but for powers of two, from the gradient of the draft's loss.

    Args:
        rounding: which one of the recipe: the same codes on the disk, but another teacher.
    """

    needs: Need = "codes"

    def __init__(self, rounding: RoundingChoice) -> None:
        self._rounding = rounding

    def problem(self, weights: WeightFormat) -> str | None:
        """See `Algorithm.problem`."""
        if weights.dtype not in FEW_BITS:
            return (
                f"rounding: {self._rounding} finds codes of four bits"
                f" ({', '.join(FEW_BITS)}); 8 bits round so finely that there is nothing to"
                " win"
            )
        if weights.first_stage is not None:
            return f"rounding: {self._rounding} finds codes of one stage"
        return None

    def quantize(
        self,
        weight: Tensor,
        weights: WeightFormat,
        *,
        absmax: Tensor | None,
        moments: InputMoments | None,
    ) -> QuantizedWeight:
        """Refuse: one weight alone does not say what its codes must be.

        Raises:
            BackendError: always.
        """
        del weight, absmax, moments
        raise BackendError(
            f"rounding: {self._rounding}, {weights}",
            "the codes of one weight follow from the whole draft and from traces",
            fix="record traces ('draftquant record') and pass --traces",
        )
