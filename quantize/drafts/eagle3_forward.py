"""Forward maths of EAGLE-3, as engines serve it; the attention projections are the family's own.

Sources: vLLM 0.33 `llama_eagle3.py`, SGLang 0.5.23 `llama_eagle3.py`, SpecForge `llama3_eagle.py`.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from .eagle3 import Eagle3Geometry
from .forward import Attend, ChainForward, OnInput, rms_norm, rotate
from .rope import RopeConfig

Linear = Callable[[str, Tensor], Tensor]
"""(canonical module name, input [..., in_features]) -> [..., out_features]."""


class Attention(Protocol):
    """The projections of a family: input [B, T, W_in] -> rotated q, k, v and the softmax scale."""

    def project(
        self, prefix: str, x: Tensor, positions: Tensor, linear: Linear
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Project with the linears below `prefix` (for example "layers.0.self_attn.")."""


class LlamaAttention:
    """Grouped-query attention: q, k, v = W x, rope over the whole head, scale head_dim^-0.5."""

    def __init__(self, *, head_dim: int, rope: RopeConfig) -> None:
        self.head_dim = head_dim
        self.rope = rope

    def project(
        self, prefix: str, x: Tensor, positions: Tensor, linear: Linear
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """See `Attention.project`."""

        def heads(name: str) -> Tensor:
            flat = linear(prefix + name, x)
            return flat.view(*flat.shape[:-1], -1, self.head_dim).transpose(1, 2)

        q = rotate(heads("q_proj"), positions, self.rope)
        k = rotate(heads("k_proj"), positions, self.rope)
        return q, k, heads("v_proj"), self.head_dim**-0.5


class Eagle3Forward(ChainForward):
    """One EAGLE-3 draft over weights given by canonical name.

    Row t pairs the fused feature of position t with token t+1 and has position id t. The hidden
    state fed into the next step is the residual stream before the final norm (after it with
    `norm_output`, the EAGLE-3.1 option).
    """

    def __init__(
        self,
        geometry: Eagle3Geometry,
        weights: Mapping[str, Tensor],
        on_input: OnInput,
        attention: Attention,
    ) -> None:
        self.geometry = geometry
        self.weights = weights
        self.on_input = on_input
        self.attention = attention
        offsets = weights.get("d2t")
        self.target_ids = None
        if offsets is not None:  # d2t holds offsets: target id = draft id + d2t[draft id]
            self.target_ids = torch.arange(offsets.numel()) + offsets.to(torch.int64)

    def fuse(self, features: Tensor) -> Tensor:
        """g_t = fc(features), input_norm or one fc_norm per target layer before it if asked."""
        if self.geometry.norm_before_fc:
            features = self._norm(features, "input_norm")
        if self.geometry.fc_norm:
            chunks = features.chunk(self.geometry.num_aux_layers, dim=-1)
            normed = [self._norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)]
            features = torch.cat(normed, dim=-1)
        return F.linear(features, self.weights["fc.weight"])

    def step(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """See `ChainForward.step`."""
        x = hidden
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            attention_input, residual = self._layer_input(prefix, layer, token_ids, x)
            q, k, v, scale = self.attention.project(
                prefix + "self_attn.", attention_input, positions, self._linear
            )
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = residual + self._linear(prefix + "self_attn.o_proj", mixed)
            x = r + self._mlp(prefix, self._norm(r, prefix + "post_attention_layernorm"))
        normed = self._norm(x, "norm")
        logits = F.linear(normed, self.weights["lm_head.weight"])
        return logits, normed if self.geometry.norm_output else x

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `ChainForward.to_target`."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def _layer_input(
        self, prefix: str, layer: int, token_ids: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(input of the attention, residual): layer 0 reads [norm(embedding); norm(hidden)]."""
        if layer > 0:
            return self._norm(x, prefix + "input_layernorm"), x
        embedded = F.embedding(token_ids, self.weights["embed_tokens.weight"])
        e = self._norm(embedded, prefix + "input_layernorm")
        u = self._norm(x, prefix + "hidden_norm")
        return torch.cat((e, u), dim=-1), u if self.geometry.norm_before_residual else x

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        gate = self._linear(prefix + "mlp.gate_proj", x)
        up = self._linear(prefix + "mlp.up_proj", x)
        return self._linear(prefix + "mlp.down_proj", F.silu(gate) * up)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.geometry.rms_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(self.on_input(name, x), self.weights[f"{name}.weight"])
