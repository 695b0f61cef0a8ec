"""Forward maths of EAGLE-3, as engines serve it; the attention projections are the family's own.

Sources: vLLM 0.33 `llama_eagle3.py`, SGLang 0.5.23 `llama_eagle3.py`, SpecForge `llama3_eagle.py`.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from ...forward import Attend, OnInput
from ...kinds.chain import ChainForward
from ...maths import embedding, linear, rms_norm, rotate, target_ids
from ...rope import RopeConfig, check_replayed
from .geometry import Eagle3Geometry


class Modules(Protocol):
    """The linears and norms of a draft, by canonical module name."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; `OnInput` sees the input first."""

    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        """Its product alone: nothing observes or rounds the input."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm over the last axis, with the draft's own epsilon."""


class Attention(Protocol):
    """The projections of a family: input [B, T, W_in] -> rotated q, k, v and the softmax scale.

    Queries and keys are [B, H, T, D] and [B, KV, T, D], values [B, KV, T, D'].
    """

    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Project with the modules below `prefix` (for example "layers.0.self_attn.")."""


class LlamaAttention:
    """Grouped-query attention: q, k, v = W x, rope over the whole head, scale head_dim^-0.5.

    With `qk_norm`, as in Qwen3, an RMS norm over each head of q and k goes before the rope. Only
    the first `rotary_dim` elements of a head are rotated, if given.
    """

    def __init__(
        self, *, head_dim: int, rope: RopeConfig, qk_norm: bool = False, rotary_dim: int = 0
    ) -> None:
        self.head_dim = head_dim
        self.rope = check_replayed(rope)
        self.qk_norm = qk_norm
        self.rotary_dim = rotary_dim or head_dim

    def project(
        self, prefix: str, x: Tensor, positions: Tensor, modules: Modules
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """See `Attention.project`."""

        def heads(name: str) -> Tensor:
            flat = modules.linear(prefix + name, x)
            return flat.view(*flat.shape[:-1], -1, self.head_dim).transpose(1, 2)

        q, k = heads("q_proj"), heads("k_proj")
        if self.qk_norm:
            q, k = modules.norm(prefix + "q_norm", q), modules.norm(prefix + "k_norm", k)
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        return q, k, heads("v_proj"), self.head_dim**-0.5

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotate(x, positions, self.rope)
        turned = rotate(x[..., : self.rotary_dim], positions, self.rope)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)


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
        self.target_ids = target_ids(weights.get("d2t"))

    @property
    def num_logits(self) -> int:
        """See `DraftForward.num_logits`."""
        return self.geometry.draft_vocab_size

    def fuse(self, features: Tensor) -> Tensor:
        """g_t = fc(features), input_norm or one fc_norm per target layer before it if asked.

        A draft without fc reads the target's last hidden state as it is.
        """
        if not self.geometry.fuses:
            return features
        if self.geometry.norm_before_fc:
            features = self.norm("input_norm", features)
        if self.geometry.fc_norm:
            chunks = features.chunk(self.geometry.num_aux_layers, dim=-1)
            normed = [self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)]
            features = torch.cat(normed, dim=-1)
        return self.linear("fc", features)

    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `ChainForward.step`."""
        x = hidden
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            attention_input, residual = self._layer_input(prefix, layer, token_ids, x)
            q, k, v, scale = self.attention.project(
                prefix + "self_attn.", attention_input, positions, self
            )
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = residual + self.linear(prefix + "self_attn.o_proj", mixed)
            x = r + self._mlp(prefix, self.norm(prefix + "post_attention_layernorm", r))
        return self.norm("norm", x) if self.geometry.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.logits`."""
        return self.kept_linear("lm_head", self.head_input(hidden))

    def head_input(self, hidden: Tensor) -> Tensor:
        """See `DraftForward.head_input`."""
        normed = hidden if self.geometry.norm_output else self.norm("norm", hidden)
        return self.on_input("lm_head", normed)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `ChainForward.to_target`."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.linear`."""
        return self.kept_linear(name, self.on_input(name, x)).to(x.dtype)

    def kept_linear(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.kept_linear`."""
        return linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """See `Modules.norm`."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.geometry.rms_norm_eps)

    def _layer_input(
        self, prefix: str, layer: int, token_ids: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(input of the attention, residual): layer 0 reads [norm(embedding); norm(hidden)]."""
        if layer > 0:
            return self.norm(prefix + "input_layernorm", x), x
        embedded = embedding(token_ids, self.weights["embed_tokens.weight"], x.dtype)
        e = self.norm(prefix + "input_layernorm", embedded)
        u = self.norm(prefix + "hidden_norm", x)
        return torch.cat((e, u), dim=-1), u if self.geometry.norm_before_residual else x

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        gate = self.linear(prefix + "mlp.gate_proj", x)
        up = self.linear(prefix + "mlp.up_proj", x)
        return self.linear(prefix + "mlp.down_proj", F.silu(gate) * up)
