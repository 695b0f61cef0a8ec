"""The target: a small transformers model, trained, shipped in BF16, and run as shipped.

This module knows the target and what it does on token ids (logits, features, greedy
continuations), not drafts.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ....calibration.recording.target_model import cache_argument
from .corpus import sample_windows
from .optimisation import Schedule, minimise

INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """Shape of the target, of whatever kind."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetKind:
    """An architecture of transformers that targets can have.

    Attributes:
        name: its `model_type`.
        config: the transformers config of a size.
        small_norms: norms that begin at `LATENT_SCALE` instead of one, by the end of their name.
    """

    name: str
    config: Callable[[TargetSize], PreTrainedConfig]
    small_norms: tuple[str, ...] = ()


LATENT_SCALE = 1 / 8
"""First value of the norm before a wide latent. The linear after it has 512 inputs: a step of Adam,
which moves them all alike, would change its outputs eight times as much as with 64, and the target
would learn nothing for a hundred steps."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What the target did on its own greedy continuations; N sequences of T tokens.

    Attributes:
        token_ids: [N, T] int64, a prompt followed by its greedy continuation.
        features: [N, T, num_aux * hidden_size] float32, outputs of the auxiliary layers in
            ascending order (before the final norm); `final_hidden` of a draft that reads none.
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
    kind: TargetKind,
    size: TargetSize,
    stream: Tensor,
    schedule: Schedule,
    *,
    sequence_length: int,
    seed: int,
) -> tuple[PreTrainedModel, tuple[float, ...]]:
    """Train a target from scratch on windows of a token stream.

    Args:
        stream: [num_tokens] int64 training text.

    Returns:
        The float32 model and the mean loss per report interval.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    # transformers 5.23 leaves from_config and get_output_embeddings without types.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        kind.config(size)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(kind.small_norms):
                weight.fill_(LATENT_SCALE)

    def next_token_loss() -> Tensor:
        windows = sample_windows(
            stream, count=schedule.batch_size, length=sequence_length, generator=generator
        )
        loss: Tensor = model(input_ids=windows, labels=windows, use_cache=False).loss
        return loss

    losses = minimise(next_token_loss, model.parameters(), schedule, label="target")
    return model, losses


def ship_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> PreTrainedModel:
    """Write the target in BF16 and read it back, so that everything later uses what ships.

    Returns:
        The shipped weights as a float32 model in evaluation mode.
    """
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _as_shipped(folder)


def copied_target(shipped: Path, folder: Path) -> PreTrainedModel:
    """Copy a target that `ship_target` wrote; returns the same as `ship_target`."""
    shutil.copytree(shipped, folder)
    return _as_shipped(folder)


def _as_shipped(folder: Path) -> PreTrainedModel:
    shipped: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shipped.train(mode=False)
    return shipped


def input_embedding(target: PreTrainedModel) -> nn.Embedding:
    """The target's token embedding."""
    return cast("nn.Embedding", target.get_input_embeddings())


def output_head(target: PreTrainedModel) -> nn.Linear:
    """The target's lm_head, final hidden state to logits."""
    layer: nn.Linear = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    return layer


@torch.no_grad()
def greedy_continuations(
    target: PreTrainedModel, prompts: Tensor, *, num_new_tokens: int, batch_size: int = 256
) -> Tensor:
    """Continue every prompt greedily.

    Args:
        prompts: [N, prompt_length] int64.

    Returns:
        [N, prompt_length + num_new_tokens] int64.
    """
    return torch.cat(
        [_continue(target, batch, num_new_tokens) for batch in torch.split(prompts, batch_size)]
    )


def _continue(target: PreTrainedModel, prompts: Tensor, num_new_tokens: int) -> Tensor:
    cache = DynamicCache(config=target.config)
    token_ids, unread = prompts, prompts
    kept = {cache_argument(target): cache}
    for _ in range(num_new_tokens):
        logits = target(input_ids=unread, logits_to_keep=1, **kept).logits
        unread = logits.argmax(dim=-1)
        token_ids = torch.cat((token_ids, unread), dim=1)
    return token_ids


@torch.no_grad()
def record_traces(
    target: PreTrainedModel,
    token_ids: Tensor,
    *,
    prompt_length: int,
    aux_layer_ids: Sequence[int] | None,
    batch_size: int = 64,
) -> Traces:
    """Run the target over finished sequences and keep what a draft sees.

    Args:
        token_ids: [N, T] int64.
        aux_layer_ids: layers whose output is kept, ascending; 0 is the first decoder layer. None =
            the last hidden state, after the final norm.
    """
    features: list[Tensor] = []
    final_hidden: list[Tensor] = []
    for batch in torch.split(token_ids, batch_size):
        output = target.base_model(input_ids=batch, output_hidden_states=True, use_cache=False)
        # hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
        aux = [output.hidden_states[layer_id + 1] for layer_id in aux_layer_ids or ()]
        features.append(torch.cat(aux, dim=-1) if aux else output.last_hidden_state)
        final_hidden.append(output.last_hidden_state)
    return Traces(token_ids, torch.cat(features), torch.cat(final_hidden), prompt_length)
