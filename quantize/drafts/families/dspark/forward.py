"""Forward maths of DSpark: DFlash's block, whose logits the token before each slot's corrects.

Sources: vLLM 0.33 `qwen3_dspark.py` and `spec_decode/dspark/speculator.py` (vanilla heads alone),
SGLang 0.5.23 `models/dspark.py`, SpecForge `modeling/draft/dspark.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ...maths import Product, embedding, linear
from ..dflash.forward import DFlashForward
from .geometry import DSparkGeometry

_HEAD = "markov_head."


class DSparkForward(DFlashForward):
    """One DSpark draft over weights given by canonical name.

    With h_j the normed hidden state of what proposes token j, and e_j the row of markov_w1 of the
    token before it, logits_j = lm_head h_j + markov_w2 s_j, where s_j is

        vanilla  e_j
        gated    sigmoid(gate_proj [h_j; e_j]) * e_j
        rnn      tanh(output), with (gate, candidate, output) = joint_proj [state; e_j; h_j] and the
                 next state sigmoid(gate) * state + (1 - sigmoid(gate)) * tanh(candidate), first 0

    The confidence head shortens rounds in engines that are told to; it changes no proposal.
    """

    geometry: DSparkGeometry

    @override
    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        # [h_j; s_j], [A, K, W + r].
        h = self.norm("norm", super().proposing(x, token_ids))
        e = self._embedded(token_ids[:, :-1], h)
        if self.geometry.markov_head_type != "rnn":
            return torch.cat((h, self._correction(h, e, e)[0]), dim=-1)
        state, found = torch.zeros_like(e[:, 0]), []
        for h_j, e_j in zip(h.unbind(1), e.unbind(1), strict=True):
            s_j, state = self._correction(h_j, e_j, state)
            found.append(s_j)
        return torch.cat((h, torch.stack(found, dim=1)), dim=-1)

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        corrections = hidden[..., self.geometry.hidden_size :]
        head = self.weights[f"{_HEAD}markov_w2.weight"]
        return [*super().products(hidden), (corrections, head, None)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        # What comes is normed already.
        return self.on_input("lm_head", hidden[..., : self.geometry.hidden_size])

    def _embedded(self, token_ids: Tensor, h: Tensor) -> Tensor:
        """e_j of the tokens before."""
        return embedding(token_ids, self.weights[f"{_HEAD}markov_w1.weight"], h.dtype)

    def _correction(self, h: Tensor, e: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """s_j [..., r] of h_j [..., W] and e_j [..., r], and the state for the next one."""
        if self.geometry.markov_head_type == "vanilla":
            return e, state
        if self.geometry.markov_head_type == "gated":
            return self._affine("gate_proj", torch.cat((h, e), dim=-1)).sigmoid() * e, state
        joint = self._affine("joint_proj", torch.cat((state, e, h), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return output.tanh(), state

    def _affine(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{_HEAD}{name}.{part}"] for part in ("weight", "bias"))
        return linear(x, weight).to(x.dtype) + bias.to(x.dtype)
