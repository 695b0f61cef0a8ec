"""The EAGLE-3 draft: one decoder layer that reads its own hidden state, trained along its chain.

The attention is a part of its own, because it is all that the Llama form and later forms do not
share: an attention projects [embedding; hidden] rows to queries, keys and values, per head.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from .corpus import END_OF_TEXT_ID
from .draft import Draft, rows
from .target import INITIALIZER_RANGE, TargetSize, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Size:
    """Shape of a Llama-style EAGLE-3 draft; hidden size and vocabulary are the target's."""

    intermediate_size: int = 640
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    aux_layer_ids: tuple[int, ...] = (0, 1, 2)


class ChainAttention(nn.Module, ABC):
    """The part of attention that differs between forms of EAGLE-3."""

    o_proj: nn.Linear
    scale: float

    @abstractmethod
    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows to rotated queries and keys, and values.

        Args:
            inputs: [N, R, 2 * hidden_size] float32, embedding half first.
            positions: [R] int64.

        Returns:
            Queries, keys, values, each [N, num_attention_heads, R, head_dim] float32.
        """


class LlamaChainAttention(ChainAttention):
    """Grouped-query attention with neox rotary embedding, 2 * hidden_size wide at its input."""

    def __init__(self, hidden_size: int, size: Eagle3Size, rope_theta: float) -> None:
        super().__init__()
        query_size = size.num_attention_heads * size.head_dim
        key_value_size = size.num_key_value_heads * size.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)
        self.head_dim = size.head_dim
        self.queries_per_key = size.num_attention_heads // size.num_key_value_heads
        self.rope_theta = rope_theta
        self.scale = size.head_dim**-0.5

    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `ChainAttention.project`."""
        queries, keys, values = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries = rotate(queries, positions, self.rope_theta)
        keys = rotate(keys, positions, self.rope_theta)
        return (
            queries,
            keys.repeat_interleave(self.queries_per_key, dim=1),
            values.repeat_interleave(self.queries_per_key, dim=1),
        )


def rotate(heads: Tensor, positions: Tensor, rope_theta: float) -> Tensor:
    """Rotary embedding, neox form: dimension i turns with dimension i + head_dim / 2.

    Args:
        heads: [..., R, head_dim] float32.
        positions: [R] int64.
        rope_theta: base of the frequencies.

    Returns:
        Same shape and dtype as `heads`.
    """
    head_dim = heads.shape[-1]
    frequencies = rope_theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., hidden_size] to [..., hidden_size]."""
        outputs: Tensor = self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return outputs


class Eagle3Layer(nn.Module):
    """Attention and norms around it; the residual is the hidden state before its norm."""

    def __init__(self, self_attn: ChainAttention, mlp: GatedMlp, hidden_size: int, eps: float):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(hidden_size, eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps)

    def concatenated(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[norm(embedding); norm(hidden)], embedding first: [N, R, 2 * hidden_size]."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual around the output projection, then the MLP: [N, R, hidden_size]."""
        residual = hidden + self.self_attn.o_proj(attended)
        outputs: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return outputs


def attend_chain(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    visible: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one draft step: the verified prefix, and the row's own earlier draft steps.

    scores = scale * [q . K_context ; q . k_own_1 ; ... ; q . k_own_j], softmax over all of them.

    Args:
        queries: [N, heads, R, head_dim] float32.
        context: keys and values of verified rows, each [N, heads, C, head_dim].
        own: keys and values of the draft steps so far, this one included, for the same R rows,
            each [N, heads, R, head_dim]; empty at depth 0, where the context holds the row itself.
        visible: [R, C] bool, True where the row may see the context row.
        scale: factor on the scores.

    Returns:
        [N, R, heads * head_dim] float32.
    """
    context_keys, context_values = context
    context_scores = (queries @ context_keys.mT).masked_fill(~visible, -torch.inf)
    own_scores = [(queries * keys).sum(dim=-1, keepdim=True) for keys, _ in own]
    weights = (scale * torch.cat((context_scores, *own_scores), dim=-1)).softmax(dim=-1)
    num_context = context_keys.shape[2]
    outputs = weights[..., :num_context] @ context_values
    for step, (_, values) in enumerate(own):
        outputs = outputs + weights[..., num_context + step, None] * values
    return outputs.transpose(1, 2).flatten(2)


class Eagle3Draft(Draft):
    """A Llama-style EAGLE-3 draft over a given target, full vocabulary."""

    def __init__(self, target: LlamaForCausalLM, target_size: TargetSize, size: Eagle3Size) -> None:
        super().__init__()
        hidden_size, eps = target_size.hidden_size, target_size.rms_norm_eps
        self.target_size, self.size = target_size, size
        attention = LlamaChainAttention(hidden_size, size, target_size.rope_theta)
        mlp = GatedMlp(hidden_size, size.intermediate_size)
        self.embed_tokens = nn.Embedding(target_size.vocab_size, hidden_size)
        self.fc = nn.Linear(len(size.aux_layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = Eagle3Layer(attention, mlp, hidden_size, eps)
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.lm_head = nn.Linear(hidden_size, target_size.vocab_size, bias=False)
        for projection in self.modules():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=INITIALIZER_RANGE)
        self.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
        self.embed_tokens.weight.requires_grad_(False)
        self.lm_head.weight.data.copy_(target.lm_head.weight)

    def chain_logits(self, traces: Traces, num_draft_tokens: int) -> list[Tensor]:
        """See `Draft.chain_logits`.

        Depth 0 pairs the fused feature of row t with token t + 1 at position t. Depth j pairs the
        hidden state of depth j - 1, before the final norm, with token t + 1 + j at position t + j.
        """
        chain_rows = rows(traces, num_draft_tokens)
        row_ids = torch.arange(chain_rows.start, chain_rows.stop)
        context_ids = torch.arange(chain_rows.stop)
        visible = context_ids <= row_ids[:, None]
        attention = self.midlayer.self_attn

        hidden = self.fc(traces.features[:, : chain_rows.stop])
        embedding = self.embed_tokens(traces.token_ids[:, 1 : chain_rows.stop + 1])
        inputs = self.midlayer.concatenated(embedding, hidden)
        queries, *context = attention.project(inputs, context_ids)
        queries, hidden = queries[:, :, chain_rows.start :], hidden[:, chain_rows.start :]

        own: list[tuple[Tensor, Tensor]] = []
        logits: list[Tensor] = []
        for depth in range(num_draft_tokens):
            if depth > 0:
                tokens = traces.token_ids[:, row_ids + 1 + depth]
                inputs = self.midlayer.concatenated(self.embed_tokens(tokens), hidden)
                queries, keys, values = attention.project(inputs, row_ids + depth)
                own.append((keys, values))
            attended = attend_chain(
                queries, (context[0], context[1]), own, visible, attention.scale
            )
            hidden = self.midlayer.finish(hidden, attended)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def quantized_weights(self) -> tuple[str, ...]:
        """See `Draft.quantized_weights`."""
        return tuple(
            f"{name}.weight"
            for name, module in self.named_modules()
            if name.startswith("midlayer.") and isinstance(module, nn.Linear)
        )

    def published_config(self) -> Mapping[str, object]:
        """See `Draft.published_config`; auxiliary layer ids name the layer whose output is read."""
        target = self.target_size
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": target.hidden_size,
            "intermediate_size": self.size.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.size.num_attention_heads,
            "num_key_value_heads": self.size.num_key_value_heads,
            "head_dim": self.size.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rope_theta": target.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": INITIALIZER_RANGE,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "tie_word_embeddings": False,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.size.aux_layer_ids),
                "use_aux_hidden_state": True,
            },
        }
