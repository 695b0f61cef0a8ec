"""What the trainer asks of a draft of any family, and the loss every family trains with.

Row t of a draft knows the tokens up to t + 1 and the target's features up to t; at depth j it
predicts token t + 2 + j. A family (a module beside this one) says how; this module only scores.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .optimisation import Schedule, minimise
from .target import Traces


class Draft(nn.Module, ABC):
    """A draft whose `state_dict` names are the names that its family publishes."""

    @abstractmethod
    def chain_logits(
        self, traces: Traces, chain_rows: range, num_draft_tokens: int
    ) -> list[Tensor]:
        """Logits of every draft step of some rows, with the recorded tokens as the chain's inputs.

        Args:
            traces: N sequences of the target.
            chain_rows: R of `rows(traces, num_draft_tokens)`, evenly spaced.
            num_draft_tokens: depths, K.

        Returns:
            K tensors [N, R, vocab_size] float32, by depth.
        """

    @abstractmethod
    def published_config(self) -> Mapping[str, object]:
        """The draft's config.json as the family's releases write it."""

    @abstractmethod
    def quantized_weights(self) -> tuple[str, ...]:
        """Names of the attention and MLP projections, the weights that quantization rounds."""


def rows(traces: Traces, num_draft_tokens: int) -> range:
    """Rows from which a whole chain can be scored.

    The first is the prompt's last token, where decoding starts; from the last, the deepest
    prediction is the last recorded token.
    """
    num_tokens = traces.token_ids.shape[1]
    return range(traces.prompt_length - 1, num_tokens - 1 - num_draft_tokens)


def predicted(per_token: Tensor, chain_rows: range, depth: int) -> Tensor:
    """The tokens that rows predict at one depth: entry t + 2 + depth of row t.

    Args:
        per_token: [N, T, ...], token ids for example.
        chain_rows: R evenly spaced rows.
        depth: draft step, 0 is the first.

    Returns:
        [N, R, ...].
    """
    shift = 2 + depth
    return per_token[:, chain_rows.start + shift : chain_rows.stop + shift : chain_rows.step]


def distillation_loss(
    draft: Draft,
    traces: Traces,
    chain_rows: range,
    target_head: nn.Module,
    *,
    num_draft_tokens: int,
    decay: float,
) -> Tensor:
    """Cross-entropy from the target's distribution to the draft's, over all depths.

    loss = sum_j decay^j * mean_t( -sum_v p_target(v | tokens <= t+1+j) log p_draft_j(v | row t) ),
    divided by sum_j decay^j.

    Args:
        draft: the draft in training.
        traces: a batch of the target's own continuations.
        chain_rows: rows to train on.
        target_head: maps final hidden states to the target's logits.
        num_draft_tokens: depths of the training-time test.
        decay: weight of each depth relative to the one before.

    Returns:
        Scalar float32.
    """
    loss = torch.zeros(())
    for depth, logits in enumerate(draft.chain_logits(traces, chain_rows, num_draft_tokens)):
        # The distribution of a token is what the target says at the position before it.
        hidden = predicted(traces.final_hidden, chain_rows, depth - 1)
        with torch.no_grad():
            target_probabilities = target_head(hidden).softmax(dim=-1)
        loss = loss + decay**depth * F.cross_entropy(
            logits.flatten(0, 1), target_probabilities.flatten(0, 1)
        )
    return loss / sum(decay**depth for depth in range(num_draft_tokens))


def train_draft(
    draft: Draft,
    traces: Traces,
    target_head: nn.Module,
    schedule: Schedule,
    *,
    num_draft_tokens: int,
    row_stride: int,
    decay: float,
    seed: int,
) -> tuple[float, ...]:
    """Train a draft in place on the target's traces, in shuffled epochs.

    A step trains on every row_stride-th row, the next step on the rows one further: where a row
    costs a draft much, as many rows of more sequences teach it more than neighbours would.

    Args:
        draft: freshly initialised draft.
        traces: training traces.
        target_head: the target's lm_head.
        schedule: steps, batch size and learning rate.
        num_draft_tokens: depths of the training-time test.
        row_stride: distance of the rows of one step.
        decay: weight of each depth relative to the one before.
        seed: decides the order of the traces.

    Returns:
        Mean loss per report interval.
    """
    generator = torch.Generator().manual_seed(seed)
    num_traces = len(traces.token_ids)
    order = torch.empty(0, dtype=torch.int64)
    first_rows = itertools.cycle(range(row_stride))

    def chain_loss() -> Tensor:
        nonlocal order
        if len(order) < schedule.batch_size:
            order = torch.randperm(num_traces, generator=generator)
        batch, order = order[: schedule.batch_size], order[schedule.batch_size :]
        chain_rows = rows(traces, num_draft_tokens)[next(first_rows) :: row_stride]
        return distillation_loss(
            draft,
            traces[batch],
            chain_rows,
            target_head,
            num_draft_tokens=num_draft_tokens,
            decay=decay,
        )

    return minimise(chain_loss, draft.parameters(), schedule, label="draft")


def ship_draft(draft: Draft, folder: Path) -> None:
    """Write the draft in BF16 and read it back, so that its figures are those of what ships.

    Args:
        draft: trained draft; its weights become the rounded ones, in float32.
        folder: created; holds config.json and model.safetensors.
    """
    folder.mkdir()
    published = {name: tensor.to(torch.bfloat16) for name, tensor in draft.state_dict().items()}
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(draft.published_config(), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    shipped = load_file(folder / "model.safetensors")
    draft.load_state_dict({name: tensor.float() for name, tensor in shipped.items()})
