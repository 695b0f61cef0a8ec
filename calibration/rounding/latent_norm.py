"""`LatentNorm`: the weight of a norm in front of quantized linears, which learns with their codes.

A factor for each channel costs nothing when served: it is in the norm's weight. What multiplies is
rounded to the dtype in which the norm is stored, so that what is learned is what is written.
"""

import math

import torch
from torch import Tensor

from ...quantize.drafts.norms import MOST_OF_NORM
from .latent_weight import straight_through

UNIT = 0.02
"""Of the factors' logarithms, so that one learning rate fits these and codes: a norm that moved ten
times as fast lost, for every channel's noise stays."""


class LatentNorm:
    """One norm: see `Latent`.

    Args:
        weight: [width] in the dtype in which it is stored, divided already where it is balanced.
        unit: see `UNIT`.

    Attributes:
        codes: [width] float32, logarithms of the factors by which it is multiplied, in units; 0 at
            first.
        log_scales: None.
    """

    def __init__(self, weight: Tensor, *, device: torch.device, unit: float = UNIT) -> None:
        self._dtype, self.unit = weight.dtype, unit
        self._start = weight.to(device, torch.float32)
        # What is nearly zero stays: halved, it could not be told from zero.
        self._moves = self._start.abs() >= 2 * torch.finfo(weight.dtype).tiny
        self.codes = torch.zeros_like(self._start).requires_grad_()
        self.log_scales: Tensor | None = None

    @torch.no_grad()
    def keep_within_reach(self) -> None:
        """Put factors back that went beyond what `verify` takes."""
        largest = math.log(MOST_OF_NORM) / self.unit
        self.codes.clamp_(-largest, largest)

    def dequantized(self) -> Tensor:
        """[width] float32, values of the dtype, with a gradient."""
        free = self._free()
        return straight_through(free.detach().to(self._dtype).float(), free)

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """The weight as it is stored."""
        return {"weights": self._free().to(self._dtype).cpu()}

    def _free(self) -> Tensor:
        return self._start * torch.where(self._moves, self.unit * self.codes, 0.0).exp()
