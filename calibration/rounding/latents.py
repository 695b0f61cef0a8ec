"""Linears and norms whose weights are learned although they are rounded, and their optimiser.

Every code has a latent, a number in units of codes, which the optimiser moves; the product
uses the code that it rounds to. The gradient goes through the rounding as if there were
none (the straight-through estimator of Bengio, Léonard and Courville 2013), and in the same way for
scales, whose logarithms are moved.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...quantize.algorithms import InputMoments, RowAlgorithm
from ...quantize.drafts.family import MOST_OF_NORM
from ...quantize.numerics.number_formats import nearest_codes, rounded_values, storable_scale
from ...quantize.numerics.quantized_weight import QuantizedWeight
from ...recipes.formats import NumberFormat
from ...recipes.schema import WeightFormat
from .learned_state import LearningSettings

START_ELEMENTS = 2**22
"""Elements of a weight whose first codes are searched at a time; a search holds several copies."""


class LatentWeight:
    """One linear [out_features, in_features] whose codes are learned.

    Attributes:
        codes: [out_features, in_features] float32, latents in units of codes; at first the weights,
            or, given `moments` of the inputs, what `start` makes of the weights.
        log_scales: [out_features, groups] float32, logarithms of factors of the first scales; None
            for scales that are powers of two: steps between them are too large to be learned.
    """

    def __init__(
        self,
        weight: Tensor,
        weights: WeightFormat,
        start: RowAlgorithm,
        *,
        absmax: Tensor | None,
        device: torch.device,
        moments: InputMoments | None,
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
        # INT4 codes come from the product with the reciprocal: see `integer_codes`.
        latents = latents * (1.0 / served) if weights.number.is_integer else latents / served
        latents = latents.view(weight.shape).clamp_(*_limits(weights.number))
        self.codes = latents.requires_grad_()
        self.log_scales = (
            None if weights.number.powers_of_two else torch.zeros_like(self._start).requires_grad_()
        )

    @torch.no_grad()
    def keep_within_reach(self) -> None:
        """Move latents that left the range of codes back to its ends."""
        self.codes.clamp_(*_limits(self._weights.number))

    def dequantized(self) -> Tensor:
        """Codes * scale, bit for bit what `quantized` dequantizes to, with a gradient for both."""
        values = straight_through(
            rounded_values(self._weights.dtype, self.codes.detach()), self.codes
        )
        served = self._served(self._scale())[..., None]
        return (values.view(*served.shape[:2], -1) * served).view(self.codes.shape)

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """The current codes and scales, on the CPU, in the dtypes of the format."""
        unit = torch.ones((), device=self.codes.device)
        return QuantizedWeight(
            codes=nearest_codes(self._weights.dtype, self.codes, unit, None).cpu(),
            scale=self._scale().to(self._stored_dtype).cpu(),
            global_scale=None if self._whole is None else self._whole.cpu(),
            group_size=self._weights.group_size,
        )

    def parts(self) -> dict[str, Tensor]:
        """The codes, their scales, and the scale of the whole weight where there is one."""
        weight = self.quantized()
        parts = {"codes": weight.codes, "scale": weight.scale}
        whole = {} if weight.global_scale is None else {"global_scale": weight.global_scale}
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
    """Ends of the latents: half a step beyond the last code. What went further would stay there."""
    return (-8.5, 7.5) if number.is_integer else (-number.largest - 1, number.largest + 1)


# A factor for each channel costs nothing when served: it is in the norm's weight. The factor
# is rounded to the dtype in which the norm is stored, so that what is learned is what is written.

UNIT = 0.02
"""Unit of the factors' logarithms, so that one learning rate fits these and codes: a norm moving
ten times as fast was worse, since every channel's noise stays."""


class LatentNorm:
    """One norm [width] in the dtype in which it is stored, already divided where it is balanced.

    `codes` [width] float32 are logarithms, in units, of the factors that multiply it.
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
        """Move factors back that went beyond what `verify` accepts."""
        largest = math.log(MOST_OF_NORM) / self.unit
        self.codes.clamp_(-largest, largest)

    def dequantized(self) -> Tensor:
        """[width] float32, values of the dtype, with a gradient."""
        free = self._free()
        return straight_through(free.detach().to(self._dtype).float(), free)

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """The weight as stored."""
        return {"weights": self._free().to(self._dtype).cpu()}

    def _free(self) -> Tensor:
        return self._start * torch.where(self._moves, self.unit * self.codes, 0.0).exp()


Latent = LatentWeight | LatentNorm
"""What the optimiser moves: `codes`, and `log_scales` where there are some, float32."""
BETAS = (0.9, 0.95)
LEAST_SHARE = 0.01  # of the learning rate, at the end
_MOMENTS = ("exp_avg", "exp_avg_sq")


class LatentOptimiser:
    """Moves the latents and scales of linears; its state can be kept and restored."""

    def __init__(self, latents: Mapping[str, Latent], settings: LearningSettings) -> None:
        self._latents, self._settings = latents, settings
        codes = {f"{name}.codes": latent.codes for name, latent in latents.items()}
        scales = {
            f"{name}.log_scales": latent.log_scales
            for name, latent in latents.items()
            if latent.log_scales is not None
        }
        self._moved = codes | scales
        groups = (
            (list(codes.values()), settings.learning_rate),
            (list(scales.values()), settings.scale_learning_rate),
        )
        self._rates = [rate for params, rate in groups if params]
        self._adam = torch.optim.Adam(
            [{"params": params, "lr": rate} for params, rate in groups if params],
            betas=BETAS,
            fused=True,  # in one pass over each weight, without a second copy
        )

    def step(self, step: int, served: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """One step, from 0 on."""
        self._adam.zero_grad(set_to_none=True)
        torch.autograd.backward(list(served), list(gradients))
        share = learning_rate_share(step, self._settings)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._adam.step()
        for latent in self._latents.values():
            latent.keep_within_reach()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name; zeros before the first."""
        tensors = dict(self._moved)
        for name, moved in self._moved.items():
            known = self._adam.state.get(moved, {})
            for moment in _MOMENTS:
                tensors[f"{name}.{moment}"] = known.get(moment, torch.zeros_like(moved))
        return tensors

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue after `step` steps with what `tensors` returned then."""
        for name, moved in self._moved.items():
            moved.copy_(tensors[name])
            if step:
                count = torch.tensor(float(step), device=moved.device)
                self._adam.state[moved] = {"step": count} | {
                    moment: tensors[f"{name}.{moment}"].to(moved.device) for moment in _MOMENTS
                }


def learning_rate_share(step: int, settings: LearningSettings) -> float:
    """Share of the full learning rate in a step (from 0 on): in (0, 1]."""
    rise = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return max(LEAST_SHARE, rise * (1 + math.cos(math.pi * step / settings.steps)) / 2)
