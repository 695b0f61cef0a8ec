"""Forward maths of EAGLE-3, as engines serve it; the attention projections are the family's own.

Sources: vLLM 0.33 `llama_eagle3.py`, SGLang 0.5.23 `llama_eagle3.py`, SpecForge `llama3_eagle.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ...forward import Attend, ModulesForward, OnInput, ProductLogits, gated_mlp
from ...maths import Product, embedding
from ...passes import ChainForward
from ..attention.forward import Attention
from .geometry import Eagle3Geometry


class Eagle3Forward(ModulesForward, ChainForward, ProductLogits):
    """One EAGLE-3 draft over weights given by canonical name.

    Row t pairs the fused feature of position t with token t+1 and has position id t. The hidden
    state fed into the next step is the residual stream before the final norm (after it with
    `norm_output`, the EAGLE-3.1 option).
    """

    geometry: Eagle3Geometry

    def __init__(
        self,
        geometry: Eagle3Geometry,
        weights: Mapping[str, Tensor],
        on_input: OnInput,
        attention: Attention,
    ) -> None:
        super().__init__(geometry, weights, on_input)
        self.attention = attention

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

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = hidden
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            attention_input, residual = self._layer_input(prefix, layer, token_ids, x)
            q, k, v, scale = self.attention.project(
                prefix + "self_attn.", attention_input, positions, self
            )
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = residual + self.linear(prefix + "self_attn.o_proj", mixed)
            x = r + gated_mlp(
                f"{prefix}mlp.", self.norm(prefix + "post_attention_layernorm", r), self
            )
        return self.norm("norm", x) if self.geometry.norm_output else x

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        return [(self.head_input(hidden), self.weights["lm_head.weight"], None)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.geometry.norm_output else self.norm("norm", hidden)
        return self.on_input("lm_head", normed)

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
