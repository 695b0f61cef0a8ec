"""The EAGLE-3 draft: one decoder layer that reads its own hidden state, trained along its chain.

The attention is a part of its own, because it is all that the forms of EAGLE-3 (modules beside this
one) do not share: it projects [embedding; hidden] rows to queries, keys and values, per head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from torch import Tensor, nn
from transformers import PreTrainedModel

from .draft import Draft
from .target import INITIALIZER_RANGE, TargetSize, Traces, input_embedding, output_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Size:
    """Shape of an EAGLE-3 draft but for its attention; hidden size and vocabulary are the target's.

    Attributes:
        aux_layer_ids: target layers whose output it reads, ascending; 0 is the first.
    """

    intermediate_size: int = 640
    num_attention_heads: int = 8
    rms_norm_eps: float = 1e-6
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
            Queries, keys, values, each [N, num_attention_heads, R, width] float32; queries and
            keys are equally wide, values may differ.
        """


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
        queries: [N, heads, R, key_width] float32.
        context: keys and values of verified rows, [N, heads, C, key_width] and
            [N, heads, C, value_width].
        own: keys and values of the draft steps so far, this one included, for the same R rows,
            R instead of C rows; empty at depth 0, where the context holds the row itself.
        visible: [R, C] bool, True where the row may see the context row.
        scale: factor on the scores.

    Returns:
        [N, R, heads * value_width] float32.
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
    """An EAGLE-3 draft over a given target, full vocabulary; a form adds attention and config."""

    def __init__(
        self,
        target: PreTrainedModel,
        target_size: TargetSize,
        size: Eagle3Size,
        attention: ChainAttention,
    ) -> None:
        super().__init__()
        hidden_size, eps = target_size.hidden_size, size.rms_norm_eps
        mlp = GatedMlp(hidden_size, size.intermediate_size)
        self.embed_tokens = nn.Embedding(target_size.vocab_size, hidden_size)
        self.fc = nn.Linear(len(size.aux_layer_ids) * hidden_size, hidden_size, bias=False)
        self.midlayer = Eagle3Layer(attention, mlp, hidden_size, eps)
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.lm_head = nn.Linear(hidden_size, target_size.vocab_size, bias=False)
        for projection in self.modules():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=INITIALIZER_RANGE)
        self.embed_tokens.weight.data.copy_(input_embedding(target).weight)
        self.embed_tokens.weight.requires_grad_(False)
        self.lm_head.weight.data.copy_(output_head(target).weight)

    def chain_logits(
        self, traces: Traces, chain_rows: range, num_draft_tokens: int
    ) -> list[Tensor]:
        """See `Draft.chain_logits`.

        Depth 0 pairs the fused feature of row t with token t + 1 at position t. Depth j pairs the
        hidden state of depth j - 1, before the final norm, with token t + 1 + j at position t + j.
        """
        row_ids = torch.tensor(chain_rows)
        context_ids = torch.arange(chain_rows.stop)
        visible = context_ids <= row_ids[:, None]
        attention = self.midlayer.self_attn

        hidden = self.fc(traces.features[:, : chain_rows.stop])
        embedding = self.embed_tokens(traces.token_ids[:, 1 : chain_rows.stop + 1])
        inputs = self.midlayer.concatenated(embedding, hidden)
        queries, *context = attention.project(inputs, context_ids)
        queries = queries[:, :, chain_rows.start :: chain_rows.step]
        hidden = hidden[:, chain_rows.start :: chain_rows.step]

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
