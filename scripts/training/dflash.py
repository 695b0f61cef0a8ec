"""The DFlash draft: a block of mask tokens behind an anchor, filled in by one forward pass.

The context is the target's features alone: every layer projects the same fused features to its keys
and values. A block attends to the context before it and to all of itself, in both directions.
Embeddings and head are the target's and are not part of the draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from torch import Tensor, nn
from transformers import PreTrainedModel

from .corpus import END_OF_TEXT_ID
from .draft import Draft
from .eagle3 import GatedMlp
from .rotary import rotate
from .target import INITIALIZER_RANGE, TargetSize, Traces, input_embedding, output_head


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashSize:
    """Shape of a DFlash draft; hidden size and vocabulary are the target's.

    Attributes:
        block_size: anchor and draft tokens, 1 + K.
        mask_token_id: the token of the slots to fill in. No text contains the end-of-text token, so
            the target never trained its embedding, and its meaning is free.
    """

    intermediate_size: int = 512
    num_hidden_layers: int = 3
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    block_size: int = 8
    mask_token_id: int = END_OF_TEXT_ID
    aux_layer_ids: tuple[int, ...] = (0, 1, 2)


class BlockAttention(nn.Module):
    """Grouped-query attention with normed queries and keys and neox rotary embedding."""

    def __init__(self, hidden_size: int, size: DFlashSize, rope_theta: float, eps: float) -> None:
        super().__init__()
        query_size = size.num_attention_heads * size.head_dim
        key_value_size = size.num_key_value_heads * size.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(size.head_dim, eps)
        self.k_norm = nn.RMSNorm(size.head_dim, eps)
        self.head_dim = size.head_dim
        self.queries_per_key = size.num_attention_heads // size.num_key_value_heads
        self.rope_theta = rope_theta

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[N, P, hidden_size] at positions [P] to [N, num_attention_heads, P, head_dim]."""
        return rotate(self.q_norm(self._heads(self.q_proj(inputs))), positions, self.rope_theta)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N, P, hidden_size] at positions [P] to two of [N, num_attention_heads, P, head_dim]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(inputs))), positions, self.rope_theta)
        values = self._heads(self.v_proj(inputs))
        return (
            keys.repeat_interleave(self.queries_per_key, dim=1),
            values.repeat_interleave(self.queries_per_key, dim=1),
        )

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)


class DFlashLayer(nn.Module):
    """A pre-norm decoder layer whose attention also reads the context."""

    def __init__(self, self_attn: BlockAttention, mlp: GatedMlp, hidden_size: int, eps: float):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)

    def forward(
        self, hidden: Tensor, positions: Tensor, context: Tensor, visible: Tensor
    ) -> Tensor:
        """One layer over R blocks of B slots.

        Args:
            hidden: [N, R * B, hidden_size] float32, block after block.
            positions: [R * B] int64.
            context: [N, C, hidden_size] float32, fused features at positions 0 to C - 1.
            visible: [R, C] bool, True where the block may see the context position.

        Returns:
            Same shape and dtype as `hidden`.
        """
        attention = self.self_attn
        inputs = self.input_layernorm(hidden)
        attended = attend_block(
            attention.queries(inputs, positions),
            attention.keys_values(context, torch.arange(context.shape[1])),
            attention.keys_values(inputs, positions),
            visible,
        )
        residual = hidden + attention.o_proj(attended)
        outputs: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return outputs


def attend_block(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """Attention of R blocks of B slots: the context before each block, and the block itself.

    scores = head_dim^-0.5 * [q . K_context ; q . K_block], softmax over both.

    Args:
        queries: [N, heads, R * B, head_dim] float32.
        context: keys and values, each [N, heads, C, head_dim].
        own: keys and values of the blocks, each [N, heads, R * B, head_dim].
        visible: [R, C] bool, True where the block may see the context position.

    Returns:
        [N, R * B, heads * head_dim] float32.
    """
    num_blocks, num_context = visible.shape
    context_keys, context_values = context
    keys, values = (_by_block(per_slot, num_blocks) for per_slot in own)
    queries = _by_block(queries, num_blocks) * queries.shape[-1] ** -0.5
    context_scores = queries.flatten(2, 3) @ context_keys.mT
    visible_scores = _by_block(context_scores, num_blocks).masked_fill(
        ~visible[:, None], -torch.inf
    )
    weights = torch.cat((visible_scores, queries @ keys.mT), dim=-1).softmax(dim=-1)
    outputs = weights[..., :num_context].flatten(2, 3) @ context_values
    outputs = outputs + (weights[..., num_context:] @ values).flatten(2, 3)
    return outputs.transpose(1, 2).flatten(2)


def _by_block(per_slot: Tensor, num_blocks: int) -> Tensor:
    """[N, heads, R * B, width] to [N, heads, R, B, width]."""
    return per_slot.reshape(*per_slot.shape[:2], num_blocks, -1, per_slot.shape[-1])


class DFlashDraft(Draft):
    """A DFlash draft over a given target, in the layout of the z-lab releases."""

    target_embedding: Tensor
    target_head: Tensor

    def __init__(self, target: PreTrainedModel, target_size: TargetSize, size: DFlashSize) -> None:
        super().__init__()
        hidden_size, eps = target_size.hidden_size, target_size.rms_norm_eps
        self.target_size, self.size = target_size, size
        self.fc = nn.Linear(len(size.aux_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps)
        self.layers = nn.ModuleList(
            DFlashLayer(
                BlockAttention(hidden_size, size, target_size.rope_theta, eps),
                GatedMlp(hidden_size, size.intermediate_size),
                hidden_size,
                eps,
            )
            for _ in range(size.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps)
        for projection in self.modules():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=INITIALIZER_RANGE)
        for name, layer in (("embedding", input_embedding(target)), ("head", output_head(target))):
            self.register_buffer(f"target_{name}", layer.weight.detach(), persistent=False)

    def chain_logits(
        self, traces: Traces, chain_rows: range, num_draft_tokens: int
    ) -> list[Tensor]:
        """See `Draft.chain_logits`: row t is the block whose anchor is token t + 1.

        Slot 0 holds the anchor, slots 1 to K the mask token, at positions t + 1 to t + 1 + K; the
        context are the features up to t. Slot 1 + j, the token at whose own position it predicts,
        is depth j.
        """
        row_ids = torch.tensor(chain_rows)
        slots = torch.arange(1 + num_draft_tokens)
        anchors = traces.token_ids[:, row_ids + 1, None]
        masks = torch.full((*anchors.shape[:2], num_draft_tokens), self.size.mask_token_id)
        hidden = F.embedding(torch.cat((anchors, masks), dim=2).flatten(1), self.target_embedding)
        positions = (row_ids[:, None] + 1 + slots).flatten()
        context = self.hidden_norm(self.fc(traces.features[:, : chain_rows.stop]))
        visible = torch.arange(chain_rows.stop) <= row_ids[:, None]
        for layer in self.layers:
            hidden = layer(hidden, positions, context, visible)
        filled = hidden.view(len(hidden), len(row_ids), len(slots), -1)[:, :, 1:]
        return list(F.linear(self.norm(filled), self.target_head).unbind(dim=2))

    def quantized_weights(self) -> tuple[str, ...]:
        """See `Draft.quantized_weights`."""
        return tuple(
            f"{name}.weight"
            for name, module in self.named_modules()
            if name.startswith("layers.") and isinstance(module, nn.Linear)
        )

    def published_config(self) -> Mapping[str, object]:
        """See `Draft.published_config`; target layer ids name the layer whose output is read."""
        target, size = self.target_size, self.size
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": size.block_size,
            "dflash_config": {
                "mask_token_id": size.mask_token_id,
                "target_layer_ids": list(size.aux_layer_ids),
            },
            "num_target_layers": target.num_hidden_layers,
            "num_hidden_layers": size.num_hidden_layers,
            "layer_types": ["full_attention"] * size.num_hidden_layers,
            "hidden_size": target.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_attention_heads": size.num_attention_heads,
            "num_key_value_heads": size.num_key_value_heads,
            "head_dim": size.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "max_window_layers": size.num_hidden_layers,
            "rope_theta": target.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": INITIALIZER_RANGE,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": "bfloat16",
        }
