"""Forward maths of a small language model, which continues the text that it reads itself.

Sources: `llama.py`, `qwen2.py` and `qwen3.py` of vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from ...forward import Attend, ModulesForward, OnInput, ProductLogits, gated_mlp
from ...maths import Product, embedding
from ...passes import TextForward
from ...shared.attention.forward import LlamaAttention
from .geometry import LanguageModelGeometry


class LanguageModelForward(ModulesForward, TextForward, ProductLogits):
    """Layers over weights given by canonical name; x + o(attention(norm x)), then the MLP alike."""

    geometry: LanguageModelGeometry

    def __init__(
        self, geometry: LanguageModelGeometry, weights: Mapping[str, Tensor], on_input: OnInput
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

    @override
    def step(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # The hidden state of the step before is not read.
        x = self._embed(token_ids)
        for layer in range(self.geometry.num_layers):
            prefix = f"layers.{layer}."
            y = self.norm(f"{prefix}input_layernorm", x)
            q, k, v, scale = self.attention.project(f"{prefix}self_attn.", y, positions, self)
            mixed = attend(layer, q, k, v, scale).transpose(1, 2).flatten(2)
            r = x + self.linear(f"{prefix}self_attn.o_proj", mixed)
            z = self.norm(f"{prefix}post_attention_layernorm", r)
            x = r + gated_mlp(f"{prefix}mlp.", z, self)
        return x

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input("lm_head", self.norm("norm", hidden))

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding [B, T, W], in the dtype of the norms."""
        dtype = self.weights["layers.0.post_attention_layernorm.weight"].dtype
        return embedding(token_ids, self.weights["embed_tokens.weight"], dtype)
