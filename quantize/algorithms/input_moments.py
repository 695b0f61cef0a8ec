"""What is known of the inputs of a linear: their second moments, and the factor that GPTQ needs."""

import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

DAMPING = 0.01
"""Added to the diagonal, as a share of its mean: what few inputs say is not believed outright."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feedback:
    """How the error of one column is made up for by those after it.

    Attributes:
        order: [in_features] int64, the columns as they are rounded: those that carry most first.
        taps: [in_features, in_features] float32 in that order, ones on the diagonal and zeros
            below: the outputs' squared error is the sum over k of d_k (E taps)_k^2, d_k > 0.
    """

    order: Tensor
    taps: Tensor


class InputMoments:
    """The mean of x xᵀ over inputs x of linears that read the same ones.

    Args:
        mean: [in_features, in_features] float32, not changed.
        device: on which its factor is found, and columns are rounded.
    """

    def __init__(self, mean: Tensor, device: torch.device | None = None) -> None:
        self.mean = mean
        self.device = device or mean.device
        self._lock = threading.Lock()
        self._feedback: Feedback | None = None

    @property
    def squares(self) -> Tensor:
        """[in_features] float32, the mean squares of the inputs."""
        return self.mean.diagonal()

    def feedback(self) -> Feedback:
        """The factor, found at the first call: 16 in_features^2 bytes meanwhile, 4 afterwards."""
        with self._lock:
            if self._feedback is None:
                self._feedback = _feedback(self.mean, self.device)
            return self._feedback

    @cached_property
    def as_inputs(self) -> Tensor:
        """Rows [in_features, in_features] float32 on the CPU with these moments, damped.

        A toolkit that asks for inputs, and reads nothing of them but their second moments, cannot
        tell these from the ones that were measured; and damping is done.
        """
        factor: Tensor = torch.linalg.cholesky(_damped(self.mean, self.device), upper=True)
        return factor.mul_(len(factor) ** 0.5).float().cpu()


def _damped(mean: Tensor, device: torch.device) -> Tensor:
    """A copy in float64, positive definite."""
    moments = mean.to(device, torch.float64)
    average = moments.diagonal().mean()
    moments.diagonal().add_(DAMPING * average if average > 0 else 1.0)
    return moments


def _feedback(mean: Tensor, device: torch.device) -> Feedback:
    """With H = R Rᵀ, R upper triangular, and taps = R / its diagonal: e H eᵀ = sum of (e R)_k^2.

    R is the Cholesky factor of H with rows and columns reversed, reversed again.
    """
    order = mean.diagonal().argsort(descending=True, stable=True)
    reverse = order.flip(0)
    moments = _damped(mean[reverse][:, reverse], device)
    taps = torch.linalg.cholesky(moments).flip(0, 1).float()
    return Feedback(order=order.to(device), taps=taps.div_(taps.diagonal().clone()))
