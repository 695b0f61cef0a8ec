"""Forward maths of DFlash, as engines serve it.

Sources: vLLM 0.33 `qwen3_dflash.py`, SGLang 0.5.23 `dflash.py`, z-lab `dflash/model.py`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ...forward import Attend, ModulesForward, OnInput, ProductLogits, gated_mlp
from ...geometry import needed_mask
from ...maths import Product, embedding, rotate
from ...passes import BlockForward
from ...rope import check_replayed
from .geometry import DFlashGeometry


class DFlashForward(ModulesForward, BlockForward, ProductLogits):
    """One DFlash draft over weights given by canonical name.

    A block is [anchor, mask x K] at positions n .. n + K, without its last mask where the anchor's
    slot proposes the first token; the context are the positions before n.
    Every layer projects the same fused rows to its context keys and values, without its
    input_layernorm, with the very linears that project the block: quantized ones read both.
    """

    geometry: DFlashGeometry

    def __init__(
        self, geometry: DFlashGeometry, weights: Mapping[str, Tensor], on_input: OnInput
    ) -> None:
        super().__init__(geometry, weights, on_input)
        self.rope = check_replayed(geometry.rope)
        self.mask_token_id = needed_mask(geometry)

    def fuse(self, features: Tensor) -> Tensor:
        """c_t = hidden_norm(fc(features))."""
        return self.norm("hidden_norm", self.linear("fc", features))

    @override
    def context(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._keys_values(f"layers.{layer}.self_attn.", rows, positions)

    @override
    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = token_ids[:, int(self.geometry.proposes_from_anchor) :]  # of the anchor and masks
        masks = torch.full_like(given[:, 1:], self.mask_token_id)
        slots = positions[:, None] + torch.arange(given.shape[1], device=positions.device)
        x = self._embed(torch.cat((token_ids[:, :1], masks), dim=1))
        for layer in range(self.geometry.num_layers):
            x = self._layer(layer, x, slots, attend)
        return self.proposing(x, token_ids)

    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Of all slots of the blocks, what `logits` predicts from; others than DFlash replace it.

        Args:
            x: [A, 1 + K or K, W], hidden states before the last norm.
            token_ids: [A, 1 + K], see `block`.

        Returns:
            [A, K, W'].
        """
        return x[:, 1 - token_ids.shape[1] :]

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        return [(self.head_input(hidden), self.weights["lm_head.weight"], None)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return self.on_input("lm_head", self.norm("norm", hidden))

    @override
    def visible(self, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        # A window counts the query's own position. Source: vLLM 0.33 `flash_attn.py`: (window - 1,
        # 0) if causal, else (window - 1, window - 1).
        behind = queries - keys
        seen = behind >= 0 if self.geometry.is_causal(layer) else torch.ones_like(behind).bool()
        if (window := self.geometry.window_of(layer)) is not None:
            seen = seen & (behind.abs() < window)
        return seen

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings; a trained mask embedding stands for the row of the mask token."""
        dtype = self.weights["norm.weight"].dtype
        embedded = embedding(token_ids, self.weights["embed_tokens.weight"], dtype)
        if "mask_embedding" not in self.weights:
            return embedded
        is_mask = (token_ids == self.mask_token_id)[..., None]
        return torch.where(is_mask, self.weights["mask_embedding"], embedded)

    def _layer(self, layer: int, x: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """With r = x + attention(norm(x)): r + mlp(norm(r))."""
        prefix = f"layers.{layer}."
        r = x + self._attention(layer, self.norm(prefix + "input_layernorm", x), slots, attend)
        return r + self._mlp(layer, self.norm(prefix + "post_attention_layernorm", r))

    def _attention(self, layer: int, y: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        prefix = f"layers.{layer}.self_attn."
        q = self._normed_heads(prefix, "q", y, slots)
        k, v = self._keys_values(prefix, y, slots)
        mixed = attend(layer, q, k, v, self.geometry.head_dim**-0.5).transpose(1, 2).flatten(2)
        return self.linear(prefix + "o_proj", mixed)

    def _mlp(self, layer: int, z: Tensor) -> Tensor:
        return gated_mlp(f"layers.{layer}.mlp.", z, self)

    def _keys_values(self, attention: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, W] -> rotate(k_norm(k_proj x)) and v_proj x, each [B, KV, T, D], as cached.

        Both engines write a block's own keys before they attend, as they do those of the context.
        """
        keys = self._normed_heads(attention, "k", x, positions)
        return self.cached(attention, keys, self._heads(attention + "v_proj", x).transpose(1, 2))

    def _normed_heads(self, attention: str, name: str, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.norm(f"{attention}{name}_norm", self._heads(f"{attention}{name}_proj", x))
        return rotate(heads.transpose(1, 2), positions, self.rope)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, H, D]."""
        return self.linear(name, x).view(*x.shape[:-1], -1, self.geometry.head_dim)
