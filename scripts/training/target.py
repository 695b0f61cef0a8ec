"""The target: a small transformers Llama, trained, shipped in BF16, and run as shipped.

This module knows the target and what it does on token ids (logits, features, greedy
continuations), not drafts.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import END_OF_TEXT_ID, sample_windows
from .optimisation import Schedule, minimise

INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """Shape of the target."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Traces:
    """What the target did on its own greedy continuations; N sequences of T tokens.

    Attributes:
        token_ids: [N, T] int64, a prompt followed by its greedy continuation.
        features: [N, T, num_aux * hidden_size] float32, outputs of the auxiliary layers in
            ascending order (before the final norm).
        final_hidden: [N, T, hidden_size] float32, what the target's lm_head reads.
        prompt_length: tokens of the prompt, the same in every sequence.
    """

    token_ids: Tensor
    features: Tensor
    final_hidden: Tensor
    prompt_length: int

    def __getitem__(self, rows: Tensor) -> "Traces":
        """The sequences `rows` ([n] int64)."""
        return Traces(
            self.token_ids[rows], self.features[rows], self.final_hidden[rows], self.prompt_length
        )


def train_target(
    size: TargetSize, stream: Tensor, schedule: Schedule, *, sequence_length: int, seed: int
) -> tuple[LlamaForCausalLM, tuple[float, ...]]:
    """Train a target from scratch on windows of a token stream.

    Args:
        size: shape of the model.
        stream: [num_tokens] int64 training text.
        schedule: steps, batch size and learning rate.
        sequence_length: tokens per window.
        seed: decides the initial weights and the windows.

    Returns:
        The float32 model and the mean loss per report interval.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(_config(size))

    def next_token_loss() -> Tensor:
        windows = sample_windows(
            stream, count=schedule.batch_size, length=sequence_length, generator=generator
        )
        loss: Tensor = model(input_ids=windows, labels=windows, use_cache=False).loss
        return loss

    losses = minimise(next_token_loss, model.parameters(), schedule, label="target")
    return model, losses


def _config(size: TargetSize) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_position_embeddings,
        rms_norm_eps=size.rms_norm_eps,
        initializer_range=INITIALIZER_RANGE,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        tie_word_embeddings=False,
    )


def ship_target(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> LlamaForCausalLM:
    """Write the target in BF16 and read it back, so that all that follows sees what ships.

    Returns:
        The shipped weights as a float32 model in evaluation mode.
    """
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shipped: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shipped.train(mode=False)
    return shipped


@torch.no_grad()
def greedy_continuations(
    target: LlamaForCausalLM, prompts: Tensor, *, num_new_tokens: int, batch_size: int = 256
) -> Tensor:
    """Continue every prompt greedily.

    Args:
        target: the shipped target.
        prompts: [N, prompt_length] int64.
        num_new_tokens: tokens to add.
        batch_size: sequences decoded together.

    Returns:
        [N, prompt_length + num_new_tokens] int64.
    """
    return torch.cat(
        [_continue(target, batch, num_new_tokens) for batch in torch.split(prompts, batch_size)]
    )


def _continue(target: LlamaForCausalLM, prompts: Tensor, num_new_tokens: int) -> Tensor:
    cache = DynamicCache(config=target.config)
    token_ids, unread = prompts, prompts
    for _ in range(num_new_tokens):
        logits = target(input_ids=unread, past_key_values=cache, logits_to_keep=1).logits
        unread = logits.argmax(dim=-1)
        token_ids = torch.cat((token_ids, unread), dim=1)
    return token_ids


@torch.no_grad()
def record_traces(
    target: LlamaForCausalLM,
    token_ids: Tensor,
    *,
    prompt_length: int,
    aux_layer_ids: Sequence[int],
    batch_size: int = 64,
) -> Traces:
    """Run the target over finished sequences and keep what a draft sees.

    Args:
        target: the shipped target.
        token_ids: [N, T] int64.
        prompt_length: tokens of the prompt in every sequence.
        aux_layer_ids: layers whose output is kept, ascending; 0 is the first decoder layer.
        batch_size: sequences read together.

    Returns:
        Traces of the N sequences.
    """
    features: list[Tensor] = []
    final_hidden: list[Tensor] = []
    for batch in torch.split(token_ids, batch_size):
        output = target.model(input_ids=batch, output_hidden_states=True, use_cache=False)
        # hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
        aux = [output.hidden_states[layer_id + 1] for layer_id in aux_layer_ids]
        features.append(torch.cat(aux, dim=-1))
        final_hidden.append(output.last_hidden_state)
    return Traces(token_ids, torch.cat(features), torch.cat(final_hidden), prompt_length)
