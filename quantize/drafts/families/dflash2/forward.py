"""Forward maths of DFlash2: DFlash with convolutions over the slots and a choice of candidates.

Sources: vLLM 0.33 `qwen3_dflash2.py` and `v1/worker/gpu/spec_decode/dflash2/speculator.py`;
SGLang 0.5.23 `dflash.py:520-591,1189-1302`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

from ...forward import Attend, DraftForward
from ...maths import embedding, linear
from ..dflash.forward import DFlashForward
from .geometry import DFlash2Geometry

_SELECTOR = "candidate_selector."


class DFlash2Forward(DFlashForward):
    """One DFlash2 draft over weights given by canonical name.

    Each slot offers the most likely tokens of the head. Among them it takes the one with the
    highest score, its logit and how well it goes with the token before it, so that the choice is a
    walk along the block. Behind tokens that are right the walk stands on the recorded tokens, and
    behind the first wrong one nothing counts: so the recorded tokens are what a slot reads here.
    """

    geometry: DFlash2Geometry

    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Hidden states of the slots and the codebook's rows of the tokens before them.

        Returns:
            [A, K, W + selector_rank].
        """
        hidden = super().proposing(x, token_ids)
        codes = self.weights[_SELECTOR + "predecessor_codebook"]
        return torch.cat((hidden, embedding(token_ids[:, :-1], codes, x.dtype)), dim=-1)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return super().head_input(hidden[..., : self.geometry.hidden_size])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the candidates, -infinity for every other token."""
        unary = self._unary(hidden)
        offered = unary.topk(self.geometry.selector_top_k, dim=-1).indices
        scores = self._scores(hidden, unary)
        return torch.full_like(scores, -torch.inf).scatter(-1, offered, scores.gather(-1, offered))

    @override
    def largest_logits(self, hidden: Tensor, most: int) -> tuple[Tensor, Tensor]:
        # No part of the vocabulary tells which tokens are candidates.
        return DraftForward.largest_logits(self, hidden, most)

    @override
    def scores(self, hidden: Tensor) -> Tensor:
        # Of all tokens, as if each were a candidate.
        return self._scores(hidden, self._unary(hidden))

    def _unary(self, hidden: Tensor) -> Tensor:
        """The head's logits."""
        return linear(self.head_input(hidden), self.weights["lm_head.weight"])

    def _scores(self, hidden: Tensor, unary: Tensor) -> Tensor:
        """Score[token] = logit[token] + <before * projection(h), successor[token]>."""
        g = self.geometry
        unary = unary * g.output_multiplier
        if g.final_logit_softcapping is not None:
            unary = g.final_logit_softcapping * (unary / g.final_logit_softcapping).tanh()
        own, before = hidden[..., : g.hidden_size], hidden[..., g.hidden_size :]
        projected = linear(
            self.norm("norm", own), self.weights[_SELECTOR + "hidden_projection.weight"]
        )
        return unary + linear(before * projected, self.weights[_SELECTOR + "successor_codebook"])

    def _embed(self, token_ids: Tensor) -> Tensor:
        return super()._embed(token_ids) * self.geometry.input_embedding_scale

    def _attention(self, layer: int, y: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        attention = super()._attention
        return self._convolved(
            f"layers.{layer}.attention_conv.", y, lambda x: attention(layer, x, slots, attend)
        )

    def _mlp(self, layer: int, z: Tensor) -> Tensor:
        mlp = super()._mlp
        return self._convolved(f"layers.{layer}.mlp_conv.", z, lambda x: mlp(layer, x))

    def _convolved(self, prefix: str, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve what a part of a layer reads and what it makes; x gives both their kernels."""
        g = self.geometry
        added = linear(x, self.weights[prefix + "kernel_projection.weight"]).to(x.dtype)
        added = added.view(*x.shape[:-1], 2, g.conv_kernel_size, g.num_groups)
        first, last = added.unbind(-3)
        base = self.weights[prefix + "base_kernel"]
        return grouped_conv(inner(grouped_conv(x, base[0], first)), base[1], last)


def grouped_conv(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """out[s] = sum over taps t of (base[t] + added[s, t]) * x[s - t], nothing before slot 0.

    Args:
        x: [A, S, W], the slots of A blocks.
        base: [taps, W], the kernel.
        added: [A, S, taps, G], what the input adds to it, the same for the W / G channels of each
            group.

    Returns:
        [A, S, W].
    """
    groups = added.shape[-1]
    kernel = base.reshape(len(base), groups, -1) + added[..., None]
    channels = x.reshape(*x.shape[:-1], groups, -1)
    out: Tensor = kernel[:, :, 0] * channels
    for tap in range(1, len(base)):
        before = F.pad(channels, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]]
        out = out + kernel[:, :, tap] * before
    return out.flatten(-2)
