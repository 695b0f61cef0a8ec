"""`PlainWeight`: a linear that is learned without being quantized, as far as its dtype lets.

It is what a quantized one is compared with: moved by the same optimiser at the same rate, in units
about as large as those of INT4 codes per channel, and rounded to the dtype in which it is stored.
"""

import torch
from torch import Tensor

from .latent_weight import straight_through

UNITS = 7.5
"""In the largest magnitude of a row, about: half the range of INT4."""
SMALLEST_UNIT = 2.0**-23
"""As of the scales of INT4."""
_EXPONENT = 0x7F800000


class PlainWeight:
    """One linear that stays unquantized: see `Latent`.

    Args:
        weight: [out_features, in_features] in the dtype in which it is stored.
        device: of what is learned.

    Attributes:
        codes: [out_features, in_features] float32, each row in units of its own. These are powers
            of two, so that what has not moved is stored bit for bit as it was.
        log_scales: None.
    """

    def __init__(self, weight: Tensor, *, device: torch.device) -> None:
        self._dtype = weight.dtype
        wide = weight.to(device, torch.float32)
        largest = wide.abs().amax(dim=1, keepdim=True) * (2**0.5 / UNITS)
        unit = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
        self._unit = unit.clamp(min=SMALLEST_UNIT)  # of a row of zeros
        self.codes = (wide / self._unit).requires_grad_()
        self.log_scales: Tensor | None = None

    def keep_within_reach(self) -> None:
        """Do nothing: there is no range."""

    def dequantized(self) -> Tensor:
        """[out_features, in_features] float32, values of the dtype, with a gradient."""
        free = self.codes * self._unit
        return straight_through(free.detach().to(self._dtype).float(), free)

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """The weight as it is stored."""
        return {"weights": (self.codes * self._unit).to(self._dtype).cpu()}
