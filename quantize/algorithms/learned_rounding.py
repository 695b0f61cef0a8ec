"""Learned rounding: calibration finds the codes of all linears together, on the draft's own output.

What is here says for which formats; the learning itself knows drafts and traces, and lies above.
"""

from typing_extensions import override

from ...recipes.formats import FEW_BITS
from ...recipes.schema import WeightFormat
from .algorithm import Algorithm, Need


class Learned(Algorithm):
    """Codes, and scales but for powers of two, from the gradient of the draft's loss."""

    needs: Need = "codes"

    @override
    def problem(self, weights: WeightFormat) -> str | None:
        if weights.dtype not in FEW_BITS:
            return (
                f"rounding: learned is for formats of four bits ({', '.join(FEW_BITS)}): rounding"
                " to 8 bits loses too little for it to improve"
            )
        if weights.first_stage is not None:
            return "rounding: learned does not work with values that are rounded in two stages"
        return None
