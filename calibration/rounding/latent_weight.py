"""`LatentWeight`: a linear whose codes and scales can be learned, though both are rounded.

Beside every code stands a number in units of codes, its latent, which the optimiser moves; what is
multiplied is the code that it rounds to. The gradient goes through the rounding as if there were
none (the straight-through estimator of Bengio, Léonard and Courville 2013), and likewise for
scales, whose logarithms are moved.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...quantize.algorithms import InputMoments, RowAlgorithm
from ...quantize.numerics.quantized_weight import QuantizedWeight
from ...quantize.numerics.rows import nearest_codes, rounded_values, storable_scale
from ...recipes.formats import NumberFormat
from ...recipes.schema import WeightFormat

START_ELEMENTS = 2**22
"""Of a weight whose first codes are looked for at a time; a search holds some copies of it."""


class Latent(Protocol):
    """A weight as the optimiser sees it.

    Attributes:
        codes: [out_features, in_features] float32, which it moves.
        log_scales: float32, which it moves too; None where there are none.
    """

    codes: Tensor
    log_scales: Tensor | None

    def keep_within_reach(self) -> None:
        """Put back what left the range from which it could return."""

    def dequantized(self) -> Tensor:
        """What is multiplied, [out_features, in_features] float32, with a gradient."""

    def parts(self) -> Mapping[str, Tensor]:
        """What of it is kept, by name, on the CPU."""


class LatentWeight:
    """One linear whose codes are learned: see `Latent`.

    Args:
        weight: [out_features, in_features] as stored, on the CPU.
        weights: the recipe's format, one that `Learned` has no problem with.
        start: finds the first scales; and the first codes, where it makes up for errors.
        absmax: see `Algorithm.quantize`; of the whole weight at least.
        moments: of the inputs, where `start` makes up for errors on them; None = latents are the
            weights themselves, and the first codes the nearest ones.

    Attributes:
        codes: [out_features, in_features] float32, latents in units of codes.
        log_scales: [out_features, groups] float32, by which the first scales are multiplied; None
            for scales that are powers of two: steps between them are too far apart to be learned.
    """

    def __init__(
        self,
        weight: Tensor,
        weights: WeightFormat,
        start: RowAlgorithm,
        *,
        absmax: Tensor | None,
        device: torch.device,
        moments: InputMoments | None = None,
    ) -> None:
        self._weights = weights
        self._groups = weights.group_size or weight.shape[1]
        parts = torch.split(weight, max(1, START_ELEMENTS // weight.shape[1]))
        largest = weight.abs().amax().float().reshape(1, 1) if absmax is None else absmax
        first = [start.quantize(p, weights, absmax=largest, moments=moments) for p in parts]
        self._stored_dtype = first[0].scale.dtype
        self._start = torch.cat([part.scale.float() for part in first]).to(device)
        whole = first[0].global_scale
        self._whole = None if whole is None else whole.to(device)
        values = weight if moments is None else torch.cat([part.dequantized() for part in first])
        latents = values.to(device, torch.float32).view(*self._start.shape, -1)
        served = self._served(self._start)[..., None]
        # INT4 codes are of the product with the reciprocal: see `int4_codes`.
        latents = latents * (1.0 / served) if weights.number.is_integer else latents / served
        latents = latents.view(weight.shape).clamp_(*_limits(weights.number))
        self.codes = latents.requires_grad_()
        self.log_scales = (
            None if weights.number.powers_of_two else torch.zeros_like(self._start).requires_grad_()
        )

    @torch.no_grad()
    def keep_within_reach(self) -> None:
        """Put latents that left the range of codes back to its ends."""
        self.codes.clamp_(*_limits(self._weights.number))

    def dequantized(self) -> Tensor:
        """Codes * scale, [out_features, in_features] float32, with a gradient for both.

        Bit for bit what `quantized` dequantizes to.
        """
        values = straight_through(
            rounded_values(self._weights.dtype, self.codes.detach()), self.codes
        )
        served = self._served(self._scale())[..., None]
        return (values.view(*served.shape[:2], -1) * served).view(self.codes.shape)

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """The codes and scales as they stand, on the CPU, in the dtypes of the format."""
        one = torch.ones((), device=self.codes.device)
        return QuantizedWeight(
            codes=nearest_codes(self._weights.dtype, self.codes, one, None).cpu(),
            scale=self._scale().to(self._stored_dtype).cpu(),
            global_scale=None if self._whole is None else self._whole.cpu(),
            group_size=self._weights.group_size,
        )

    def parts(self) -> dict[str, Tensor]:
        """The codes, their scales, and the scale of the whole weight where there is one."""
        found = self.quantized()
        parts = {"codes": found.codes, "scale": found.scale}
        whole = {} if found.global_scale is None else {"global_scale": found.global_scale}
        return parts | whole

    def _scale(self) -> Tensor:
        """[out_features, groups] float32, as stored."""
        if self.log_scales is None:
            return self._start
        free = self._start * self.log_scales.exp()
        stored = storable_scale(self._weights.dtype, free.detach(), self._stored_dtype)
        return straight_through(stored.float(), free)

    def _served(self, scale: Tensor) -> Tensor:
        return scale if self._whole is None else scale * self._whole


def straight_through(value: Tensor, free: Tensor) -> Tensor:
    """`value`, bit for bit, with the gradient of `free`, which is finite."""
    return value + (free - free.detach())


def _limits(number: NumberFormat) -> tuple[float, float]:
    """Where latents end: half a step beyond the last code. What went further would stay there."""
    return (-8.5, 7.5) if number.is_integer else (-number.largest - 1, number.largest + 1)
