"""Learned rounding: calibration finds the codes of all linears together, on the draft's own output.

What is here says for which formats; the learning itself knows drafts and traces, and lies above.
"""

from typing_extensions import override

from ...recipes.algorithm import RoundingChoice
from ...recipes.formats import FEW_BITS
from ...recipes.schema import WeightFormat
from .algorithm import Algorithm, Need


class Learned(Algorithm):
    """Codes, and scales but for powers of two, from the gradient of the draft's loss.

    Args:
        rounding: which one of the recipe: the same codes on the disk, but another teacher.
    """

    needs: Need = "codes"

    def __init__(self, rounding: RoundingChoice) -> None:
        self._rounding = rounding

    @override
    def problem(self, weights: WeightFormat) -> str | None:
        if weights.dtype not in FEW_BITS:
            return (
                f"rounding: {self._rounding} is for formats of four bits"
                f" ({', '.join(FEW_BITS)}): rounding to 8 bits loses too little for it to"
                " improve"
            )
        if weights.first_stage is not None:
            return (
                f"rounding: {self._rounding} does not work with values that are rounded in"
                " two stages"
            )
        return None
