"""The probability that a drafted token is reached and accepted, as a confidence head has it.

The head says c_j = sigmoid(z_j / T_j), how likely token j is accepted if all before it are, with
the temperatures T_j of SGLang, or 1. The survival of token j is c_1 ... c_j: by it engines choose
which tokens of a block they verify.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def confidences(logits: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """c_j [..., K] float32, as SGLang 0.5.23 computes it (`models/dspark.py:461`).

    Args:
        logits: [..., K] of the confidence head.
        temperatures: [K] above 0; None = 1, as vLLM 0.33 has it (`qwen3_dspark.py:310`).
    """
    wide = logits.float()
    return (wide if temperatures is None else wide / torch.tensor(temperatures)).sigmoid()


def survivals(logits: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """[..., K] float64, for statistics: rounded less than an engine's."""
    wide = logits.double()
    if temperatures is not None:
        wide = wide / torch.tensor(temperatures, dtype=torch.float64)
    return wide.sigmoid().cumprod(-1)
