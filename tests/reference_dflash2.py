"""DFlash2 decoding one token after the other, over `ReferenceDFlash`.

Convolutions and the walk over the candidates are spelled out in loops; nothing of `quantize/drafts`
is used but the geometry. Unlike replay, which reads the recorded tokens, this reads the tokens that
it chose.
"""

from collections.abc import Mapping
from typing import Any

import torch
from draftquant.quantize.drafts.families.dflash2 import DFlash2Geometry
from reference_dflash import ReferenceDFlash
from torch import Tensor, nn

_OWN = ("candidate_selector.", "attention_conv.", "mlp_conv.")


class ReferenceDFlash2(ReferenceDFlash):
    """A block is one pass, then a walk among the candidates of its slots."""

    def __init__(self, geometry: DFlash2Geometry, weights: Mapping[str, Tensor],
                 round_input: Any = None) -> None:  # fmt: skip
        plain = {n: w for n, w in weights.items() if not any(mark in n for mark in _OWN)}
        super().__init__(geometry, plain, round_input)
        self.own = {n: w.double() for n, w in weights.items() if n not in plain}
        self.norm.register_forward_hook(lambda _module, _args, out: self._remember(out))
        for i, layer in enumerate(self.layers):
            self._wrap(layer.self_attn, f"layers.{i}.attention_conv.")
            self._wrap(layer.mlp, f"layers.{i}.mlp_conv.")

    def _remember(self, out: Tensor) -> None:
        """The normed hidden states of the last block."""
        self.hidden = out[0]

    def _wrap(self, module: nn.Module, prefix: str) -> None:
        kernels: list[Tensor] = []

        def before(_module: nn.Module, args: Any, named: Any) -> Any:
            x = named["hidden_states"] if named else args[0]
            g: Any = self.geometry
            added = x @ self.own[prefix + "kernel_projection.weight"].T
            shape = (*x.shape[:2], 2, g.conv_kernel_size, g.hidden_size // g.conv_group_size)
            kernels[:] = added.view(shape).unbind(2)
            x = self._convolved(x, prefix, 0, kernels[0])
            return (args, {**named, "hidden_states": x}) if named else ((x,), named)

        def after(_module: nn.Module, _args: Any, _named: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (self._convolved(out[0], prefix, 1, kernels[1]), *out[1:])
            return self._convolved(out, prefix, 1, kernels[1])

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _convolved(self, x: Tensor, prefix: str, side: int, added: Tensor) -> Tensor:
        base, out = self.own[prefix + "base_kernel"][side], torch.zeros_like(x)
        size = self.geometry.conv_group_size  # type: ignore[attr-defined]
        for slot in range(x.shape[1]):
            for tap in range(min(len(base), slot + 1)):
                coefficients = base[tap] + added[0, slot, tap].repeat_interleave(size)
                out[0, slot] += coefficients * x[0, slot - tap]
        return out

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """See `ReferenceDFlash.draft`."""
        g: Any = self.geometry
        logits, chosen = self.propose(anchor, num_draft_tokens), [anchor]
        codes = {name: self.own[f"candidate_selector.{name}_codebook"]
                 for name in ("predecessor", "successor")}  # fmt: skip
        projection = self.own["candidate_selector.hidden_projection.weight"]
        for slot in range(num_draft_tokens):
            candidates = logits[slot].argsort(descending=True)[: g.selector_top_k].tolist()
            before = codes["predecessor"][chosen[-1]] * (projection @ self.hidden[slot + 1])
            scores = {c: logits[slot, c] + before @ codes["successor"][c] for c in candidates}
            chosen.append(max(scores, key=lambda token: float(scores[token])))
        return chosen[1:]
