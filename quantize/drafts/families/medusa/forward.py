"""Forward maths of Medusa: residual blocks over the target's last state, and a head behind each.

Source: `models/medusa.py` and `v1/spec_decode/medusa.py` of vLLM 0.32, which proposes the most
likely token of every head; `medusa/model/medusa_model.py` of FasterDecoding/Medusa @e2a5d20, whose
engine draws a tree of candidates from the same logits.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

from ...forward import ProductLogits
from ...kinds.heads import HeadsForward
from ...maths import Product, linear
from .geometry import MedusaGeometry


class MedusaForward(HeadsForward, ProductLogits):
    """Medusa heads over weights given by canonical name.

    Head i makes of the state x_0 = h of position t, with x_{j+1} = x_j + silu(W_ij x_j + b_ij),
    the logits H_i x of the token at t + 2 + i.
    """

    geometry: MedusaGeometry

    @override
    def propose(self, hidden: Tensor, depth: int) -> Tensor:
        # [x; depth], [..., W + 1].
        x = hidden
        for layer in range(self.geometry.layers_per_head):
            name = f"blocks.{depth}.layers.{layer}"
            product = linear(self.on_input(name, x), self.weights[f"{name}.weight"]).to(x.dtype)
            bias = self.weights.get(f"{name}.bias")
            x = x + F.silu(product if bias is None else product + bias)
        return torch.cat((x, x.new_full((*x.shape[:-1], 1), depth)), dim=-1)

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        head = self.weights[f"{self._head(hidden)}.weight"]
        return [(self.head_input(hidden), head, None)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input(self._head(hidden), hidden[..., :-1])

    @override
    def to_target(self, draft_ids: Tensor) -> Tensor:
        # token_map holds the target's ids themselves.
        ids = self.weights.get("token_map")
        return draft_ids if ids is None else ids.to(torch.int64)[draft_ids]

    def _head(self, hidden: Tensor) -> str:
        """The head that reads these states, which are those of one depth.

        Raises:
            ValueError: of several.
        """
        first, last = int(hidden[..., -1].min()), int(hidden[..., -1].max())
        if first != last:
            raise ValueError(f"expected hidden states of one depth, got those of {first} to {last}")
        return f"lm_heads.{0 if self.geometry.shared_head else first}"
