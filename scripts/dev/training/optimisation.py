"""The training loop that targets and drafts share: AdamW or Muon, warm-up, cosine decay.

The number of steps is fixed in advance and never follows the clock, so a seed gives one result.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

_PROGRESS = Console(stderr=True)
_REPORT_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast one model trains; `muon`: matrices take Muon's steps, not AdamW's."""

    num_steps: int
    batch_size: int
    max_learning_rate: float
    weight_decay: float = 0.1
    warmup_share: float = 0.1
    muon: bool = False

    def factor(self, step: int) -> float:
        """Share of the maximal learning rate at a step: linear rise, then half a cosine to 0."""
        progress = (step + 1) / (self.num_steps + 1)
        if progress < self.warmup_share:
            return progress / self.warmup_share
        return 0.5 + 0.5 * math.cos(
            math.pi * (progress - self.warmup_share) / (1 - self.warmup_share)
        )


def minimise(
    loss_of_step: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    schedule: Schedule,
    *,
    label: str,
    kept: Path | None = None,
) -> tuple[float, ...]:
    """Take `schedule.num_steps` optimizer steps.

    Args:
        loss_of_step: draws a batch and returns its loss, a scalar float32 tensor.
        kept: file of where training stands, written every few steps; where it exists, training
            goes on from there, with torch's own random numbers as they were. None = keep nothing.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizers = _optimizers(trained, schedule)
    parts: list[Optimizer | LambdaLR] = [*optimizers]
    parts += [LambdaLR(optimizer, schedule.factor) for optimizer in optimizers]
    means, recent, taken = list[float](), list[float](), 0
    if kept is not None and kept.exists():
        stands = torch.load(kept, weights_only=True)
        taken, means = stands["step"], stands["means"]
        with torch.no_grad():
            for parameter, value in zip(trained, stands["trained"], strict=True):
                parameter.copy_(value)
        for part, state in zip(parts, stands["parts"], strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(stands["random"])
    for step in range(taken + 1, schedule.num_steps + 1):
        loss = loss_of_step()
        for parameter in trained:
            parameter.grad = None
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained, max_norm=1.0)
        for part in parts:
            part.step()
        recent.append(loss.item())
        if step % _REPORT_EVERY == 0 or step == schedule.num_steps:
            means.append(sum(recent) / len(recent))
            recent.clear()
            _PROGRESS.print(f"{label} step {step}/{schedule.num_steps} loss {means[-1]:.3f}")
            if kept is not None:
                stands = {
                    "step": step,
                    "means": means,
                    "trained": trained,
                    "parts": [part.state_dict() for part in parts],
                    "random": torch.get_rng_state(),
                }
                torch.save(stands, kept.with_suffix(".partial"))
                kept.with_suffix(".partial").replace(kept)
    return tuple(means)


def _optimizers(trained: Sequence[Tensor], schedule: Schedule) -> list[Optimizer]:
    rate, decay = schedule.max_learning_rate, schedule.weight_decay
    matrices = [one for one in trained if schedule.muon and one.ndim == 2]
    others = [one for one in trained if not (schedule.muon and one.ndim == 2)]
    adamw = AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]
