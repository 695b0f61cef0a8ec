"""A DFlash draft assembled from transformers' own modules: the oracle of our forward maths.

It shares no line with `quantize/drafts`: projections, q and k norms, rope, attention, MLP and the
KV cache are those of `transformers.models.qwen3`, the masks those of `transformers.masking_utils`.
It is fed like an engine feeds it: `extend` with the features of verified positions, then `propose`.
"""

from collections.abc import Callable, Mapping

import reference_draft
import torch
from draftquant.quantize.drafts import Family
from draftquant.quantize.drafts.families.dflash import DFlash
from draftquant.quantize.drafts.shared.block_layers import DFlashGeometry
from reference_draft import common_config
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

_DFLASH = DFlash()
RoundInput = Callable[[str, Tensor], Tensor]


class ReferenceDFlash(nn.Module):
    """One draft whose KV cache holds the context; arguments are those of `ReferenceDraft`."""

    def __init__(
        self,
        geometry: DFlashGeometry,
        weights: Mapping[str, Tensor],
        round_input: RoundInput | None = None,
    ) -> None:
        super().__init__()
        self.geometry = g = geometry
        config = Qwen3Config(
            **common_config(g),
            num_key_value_heads=g.attention.num_key_value_heads,
            head_dim=g.attention.head_dim,
            attention_bias=False,
        )
        self.embed_tokens = nn.Embedding(g.vocab_size, g.hidden_size)
        self.fc = nn.Linear(g.num_aux_layers * g.target_hidden_size, g.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.layers = nn.ModuleList(_layer(config, i) for i in range(g.num_layers))
        self.norm = Qwen3RMSNorm(g.hidden_size, g.rms_norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, g.draft_vocab_size, bias=False)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.d2t = weights.get("d2t")
        wanted = {k: v for k, v in weights.items() if k not in {"d2t", "t2d", "mask_embedding"}}
        self.to(next(iter(wanted.values())).dtype)
        self.load_state_dict(wanted)
        self.requires_grad_(False)
        if "mask_embedding" in weights:  # as SGLang does it: the row of the table is replaced
            self.embed_tokens.weight.data[g.mask_token_id] = weights["mask_embedding"]
        if round_input is not None:
            round_inputs(self, round_input)
        self.cache = DynamicCache()

    def extend(self, features: Tensor) -> None:
        """Append the context rows of features [1, T, num_aux * W_target]."""
        rows = self.hidden_norm(self.fc(features))
        start = self.cache.get_seq_length()
        cos, sin = self.rotary(rows, torch.arange(start, start + rows.shape[1])[None])
        for i, layer in enumerate(self.layers):
            attention = layer.self_attn
            heads = (1, rows.shape[1], -1, self.geometry.attention.head_dim)
            keys = attention.k_norm(attention.k_proj(rows).view(heads)).transpose(1, 2)
            values = attention.v_proj(rows).view(heads).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
            self.cache.update(keys, values, i)

    def propose(self, anchor: int, num_draft_tokens: int) -> Tensor:
        """Logits [K, draft vocabulary] of the slots behind an anchor that follows the context."""
        logits: Tensor = self.lm_head(self.slots(anchor, num_draft_tokens)[1:])
        return logits

    def slots(self, anchor: int, num_masks: int) -> Tensor:
        """Normed states [1 + num_masks, W] of an anchor that follows the context, and of masks."""
        ids = [anchor] + [self.geometry.mask_token_id] * num_masks
        start = self.cache.get_seq_length()
        slots = torch.arange(start, start + len(ids))
        x = self.embed_tokens(torch.tensor([ids]))
        rope = self.rotary(x, slots[None])
        for i, layer in enumerate(self.layers):
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(x),
                position_embeddings=rope,
                attention_mask=self._mask(i, slots, x.dtype),
                past_key_values=self.cache,
            )
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.cache.crop(-len(ids))
        hidden: Tensor = self.norm(x)[0]
        return hidden

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """The proposed tokens, target vocabulary."""
        ids = self.propose(anchor, num_draft_tokens).argmax(-1)
        return (ids if self.d2t is None else ids + self.d2t[ids]).tolist()

    def _mask(self, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[1, 1, S, C + S], zero where a slot looks."""
        g = self.geometry
        sliding = (g.layer_types or ["full_attention"] * g.num_layers)[layer] != "full_attention"
        causal = sliding if g.causal is None else g.causal
        if sliding:
            look = (
                sliding_window_causal_mask_function(g.sliding_window)
                if causal  # the window of engines counts the own position, this one does not:
                else sliding_window_bidirectional_mask_function(g.sliding_window - 1)
            )
        else:
            look = causal_mask_function if causal else bidirectional_mask_function
        keys = torch.arange(int(slots[-1]) + 1)
        seen = look(0, 0, slots[:, None], keys[None]).expand(len(slots), len(keys))
        blocked = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
        return blocked[None, None]


def random_weights(
    geometry: DFlashGeometry, seed: int = 0, family: Family = _DFLASH
) -> dict[str, Tensor]:
    """See `reference_draft.random_weights`."""
    return reference_draft.random_weights(geometry, seed, family)


def _layer(config: Qwen3Config, index: int) -> nn.Module:
    layer = nn.Module()
    layer.self_attn = Qwen3Attention(config, index)
    layer.mlp = Qwen3MLP(config)
    layer.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    layer.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    return layer


def round_inputs(draft: nn.Module, rounding: RoundInput) -> None:
    """Let `rounding` see, and replace, the input of every attention and MLP linear."""
    for name, module in draft.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            module.register_forward_pre_hook(
                lambda _module, args, name=name: (rounding(name, args[0]), *args[1:])
            )
