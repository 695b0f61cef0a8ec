"""The optimiser of latents: Adam, whose learning rate rises shortly and falls as a cosine does."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .latent_weight import Latent
from .learning_settings import LearningSettings

BETAS = (0.9, 0.95)
LEAST_SHARE = 0.01
"""Of the learning rate, at the end."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class LatentOptimiser:
    """Moves the latents and scales of linears; what it knows can be kept and restored.
    """

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
            fused=True,  # in one pass over each weight, without a second copy of anything
        )

    def step(self, step: int, served: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """One step.

        Args:
            step: from 0 on.
            served: what `Latent.dequantized` gave, with its graph.
        """
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
        found = dict(self._moved)
        for name, moved in self._moved.items():
            known = self._adam.state.get(moved, {})
            for moment in _MOMENTS:
                found[f"{name}.{moment}"] = known.get(moment, torch.zeros_like(moved))
        return found

    @torch.no_grad()
    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Go on after `step` steps with what `tensors` gave then."""
        for name, moved in self._moved.items():
            moved.copy_(tensors[name])
            if step:
                count = torch.tensor(float(step), device=moved.device)
                self._adam.state[moved] = {"step": count} | {
                    moment: tensors[f"{name}.{moment}"].to(moved.device) for moment in _MOMENTS
                }


def learning_rate_share(step: int, settings: LearningSettings) -> float:
    """Of the full learning rate, in a step (from 0 on): in (0, 1]."""
    rise = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return max(LEAST_SHARE, rise * (1 + math.cos(math.pi * step / settings.steps)) / 2)
