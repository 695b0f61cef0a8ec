"""One scale and one shift of the confidence head's logits, the same at all positions.

Temperatures are for SGLang alone, and mend no shift. These two numbers an engine reads in the head
itself: proj (x) * scale + shift is a head with the weight times the scale, and the bias times the
scale and plus the shift. They are fitted by the cross-entropy of what the head says, that a token
is accepted if all before it are (Platt's scaling), which is convex: by Newton's method.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from .calibration_error import SurvivalCounts, calibration_errors
from .survival import survivals

_STEPS, _HALVINGS = 50, 30
_PRIOR = 1e-3
"""Weight of the wish that the head stays as it is, in tokens: what few tokens cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScaling:
    """What a head needs.

    Attributes:
        scale, shift: of its logits; 1 and 0 = nothing.
        ece_before, ece_after: [K] expected calibration errors of the survival on the steps of the
            fit, without and with them.
    """

    scale: float
    shift: float
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def shared_scaling(logits: Tensor, accepted: Tensor) -> SharedScaling:
    """Fit them.

    Args:
        logits: [N, K] of the confidence head at N verify steps, one at least.
        accepted: [N] draft tokens that the target accepts of all K.
    """
    logits = logits.double()
    positions = torch.arange(logits.shape[1])
    reached = positions <= accepted[:, None]
    z, right = logits[reached], (positions < accepted[:, None])[reached].double()
    inputs = torch.stack((z, torch.ones_like(z)))
    unchanged = logits.new_tensor((1.0, 0.0))

    def cost(numbers: Tensor) -> Tensor:
        wish = _PRIOR / 2 * (numbers - unchanged).square().sum()
        return F.binary_cross_entropy_with_logits(numbers @ inputs, right, reduction="sum") + wish

    found = unchanged
    for _ in range(_STEPS):
        said = (found @ inputs).sigmoid()
        slope = inputs @ (said - right) + _PRIOR * (found - unchanged)
        curvature = (inputs * (said * (1 - said))) @ inputs.T + _PRIOR * torch.eye(2).double()
        step = torch.linalg.solve(curvature, slope)
        tried = [found - step / 2**halved for halved in range(_HALVINGS)]
        found = next((one for one in tried if cost(one) < cost(found)), found)
    scale, shift = found.tolist()
    return SharedScaling(
        scale=scale,
        shift=shift,
        ece_before=_errors(logits, accepted),
        ece_after=_errors(logits * scale + shift, accepted),
    )


def _errors(logits: Tensor, accepted: Tensor) -> tuple[float, ...]:
    return tuple(calibration_errors(SurvivalCounts.of(survivals(logits), accepted).bins).tolist())
