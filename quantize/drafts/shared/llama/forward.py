"""Forward maths of drafts of ordinary Llama layers: EAGLE-1 heads and small language models.

Sources: `eagle/model/cnets1.py` of SafeAILab/EAGLE @cb7e084; `llama_eagle.py`, `llama.py`,
`qwen2.py` and `qwen3.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ...forward import Attend, OnInput, ProductLogits
from ...kinds.chain import ChainForward
from ...kinds.text import TextForward
from ...maths import Product, embedding
from ..attention.forward import LlamaAttention
from ..module_forward import ModulesForward, gated_mlp
from .geometry import LlamaGeometry


class LlamaForward(ModulesForward, ChainForward, ProductLogits):
    """Layers over weights given by canonical name; x + o(attention(norm x)), then the MLP alike."""

    geometry: LlamaGeometry

    def __init__(
        self, geometry: LlamaGeometry, weights: Mapping[str, Tensor], on_input: OnInput
    ) -> None:
        super().__init__(geometry, weights, on_input)
        self.attention = LlamaAttention(
            head_dim=geometry.head_dim, rope=geometry.rope, qk_norm=geometry.qk_norm
        )

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        # A tied head is the embedding.
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        return [(self.head_input(hidden), head, None)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding [B, T, W], in the dtype of the norms."""
        dtype = self.weights["layers.0.post_attention_layernorm.weight"].dtype
        return embedding(token_ids, self.weights["embed_tokens.weight"], dtype)

    def layers(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, T, W] behind all layers."""
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            inner = f"{prefix}input_layernorm"
            y = self.norm(inner, x) if f"{inner}.weight" in self.weights else x
            q, k, v, scale = self.attention.project(f"{prefix}self_attn.", y, positions, self)
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = x + self.linear(f"{prefix}self_attn.o_proj", mixed)
            z = self.norm(f"{prefix}post_attention_layernorm", r)
            x = r + gated_mlp(f"{prefix}mlp.", z, self)
        return x


class Eagle1Forward(LlamaForward):
    """Row t pairs the target's last hidden state of position t with token t + 1, at position t.

    No norm stands before layer 0 or before the head: what the layers give out is both the next
    step's hidden state and what the head reads.
    """

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # layers(fc([embedding; hidden])).
        x = self.linear("fc", torch.cat((self.embed(token_ids), hidden), dim=-1))
        return self.layers(x, positions, attend)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input("lm_head", hidden)


class LanguageModelForward(LlamaForward, TextForward):
    """A language model, which continues the text that it reads itself."""

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # The hidden state of the step before is not read.
        return self.layers(self.embed(token_ids), positions, attend)

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input("lm_head", self.norm("norm", hidden))
