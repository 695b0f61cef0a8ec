"""A draft in training, and the loss that every kind of draft trains with.

Names, shapes and maths are those of the draft's family; its chains or blocks are the passes that
replay and calibration run. Row t knows the tokens up to t + 1 and the target's features up to t; at
depth j it predicts token t + 2 + j.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch program uses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....calibration.passes.proposals import batch_proposals
from ....quantize.drafts import Family
from ....quantize.drafts.forward import DraftForward, DraftPass, whole_rows
from ....quantize.drafts.geometry import Geometry
from .optimisation import Schedule, minimise
from .target import (
    INITIALIZER_RANGE,
    LATENT_SCALE,
    TargetSize,
    Traces,
    input_embedding,
    output_head,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKind:
    """How drafts of a family are published.

    Attributes:
        family: names, shapes and maths.
        config: the config.json of a draft over a target.
        first_layer: how published names spell "layers.0.".
        ships_tables: an embedding and a head of its own are part of the draft, the head trained
            with it; else both are the target's.
        outside: how published names spell modules outside the layers, where not as families do.
    """

    family: Family
    config: Callable[[TargetSize], Mapping[str, Any]]
    first_layer: str = "layers.0."
    ships_tables: bool = False
    outside: Mapping[str, str] = field(default_factory=dict)

    def published_name(self, canonical: str) -> str:
        """How a tensor is spelled in what ships."""
        if canonical.startswith("layers.0."):
            return self.first_layer + canonical.removeprefix("layers.0.")
        module = canonical.partition(".")[0]
        return self.outside.get(module, module) + canonical.removeprefix(module)

    def geometry(self, target_size: TargetSize) -> Geometry:
        """What shapes and maths of a draft over the target follow from."""
        return self.family.read_geometry(self.config(target_size), "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft as it trains, or as it ships.

    Attributes:
        kind: its family, and how that is published.
        geometry: what shapes and maths follow from.
        weights: float32 by canonical name, embedding and head included; those that train require
            gradients.
    """

    kind: DraftKind
    geometry: Geometry
    weights: Mapping[str, Tensor]

    @property
    def forward(self) -> DraftForward:
        """The family's maths over the weights."""
        return self.kind.family.forward(self.geometry, self.weights, lambda _name, x: x)

    def passes(self, traces: Traces, rows: range, num_draft_tokens: int) -> Iterator[DraftPass]:
        """`DraftForward.passes`, with the recorded tokens as the inputs of the chains."""
        forward = self.forward
        hidden = forward.fuse(traces.features[:, : rows.stop])
        return forward.passes(
            hidden, traces.token_ids, rows=rows, num_draft_tokens=num_draft_tokens
        )

    @torch.no_grad()
    def proposals(self, traces: Traces, num_draft_tokens: int) -> Tensor:
        """The tokens drafted from `scored_rows`: [N, R, num_draft_tokens] int64."""
        forward = self.forward
        length, first_row = traces.token_ids.shape[1], traces.prompt_length - 1
        return batch_proposals(
            forward,
            forward.fuse(traces.features),
            traces.token_ids,
            rows=whole_rows(length, num_draft_tokens, first_row=first_row),
            num_draft_tokens=num_draft_tokens,
        ).token_ids

    def published(self) -> Mapping[str, Tensor]:
        """The weights that ship, by published name."""
        specs = self.kind.family.tensor_specs(self.geometry)
        return {
            self.kind.published_name(name): weight
            for name, weight in self.weights.items()
            if self.kind.ships_tables or specs[name].role not in self._left_to_target
        }

    @property
    def _left_to_target(self) -> tuple[str, ...]:
        """Roles of the target's own tables; a head of fewer rows is the draft's."""
        return ("embedding",) if "d2t" in self.weights else ("embedding", "head")


def fresh_draft(kind: DraftKind, target: PreTrainedModel, target_size: TargetSize) -> Draft:
    """A draft to begin training with; torch is seeded before.

    Linears are normal, norms are one, but for that of a latent, biases zero; a convolution changes
    nothing. Embedding and head begin as the target's, and the embedding stays so.
    """
    geometry = kind.geometry(target_size)
    weights: dict[str, Tensor] = {}
    for name, spec in kind.family.tensor_specs(geometry).items():
        shape = tuple(dim.size for dim in spec.shape)
        table = spec.role in ("embedding", "head")
        # Of what is optional, a confidence head changes no proposal.
        if spec.role == "vocabulary_map" or (spec.optional and not table):
            continue
        if spec.role == "embedding":
            weights[name] = input_embedding(target).weight.detach().clone()
        elif spec.role == "head":
            weights[name] = output_head(target).weight.detach().clone()
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        elif spec.role == "norm":
            latent = name.endswith("kv_a_layernorm.weight")
            weights[name] = torch.full(shape, LATENT_SCALE if latent else 1.0)
        else:
            weights[name] = torch.normal(0.0, INITIALIZER_RANGE, shape)
            if name.endswith(".base_kernel"):  # a convolution that changes nothing
                weights[name] = torch.zeros(shape)
                weights[name][:, 0] = 1
        own = kind.ships_tables or spec.role != "head"
        weights[name].requires_grad_(own and spec.role != "embedding")
    return Draft(kind=kind, geometry=geometry, weights=weights)


def scored_rows(traces: Traces, num_draft_tokens: int) -> range:
    """Rows from which all depths can be scored, from the prompt's last token on."""
    num_tokens = traces.token_ids.shape[1]
    return whole_rows(num_tokens, num_draft_tokens, first_row=traces.prompt_length - 1)


def predicted(per_token: Tensor, rows: range, depth: int) -> Tensor:
    """The tokens that rows predict at one depth: entry t + 2 + depth of row t.

    Args:
        per_token: [N, T, ...], token ids for example.

    Returns:
        [N, R, ...].
    """
    shift = 2 + depth
    return per_token[:, rows.start + shift : rows.stop + shift : rows.step]


def distillation_loss(
    draft: Draft,
    traces: Traces,
    rows: range,
    target_head: nn.Module,
    *,
    num_draft_tokens: int,
    decay: float,
) -> Tensor:
    """Cross-entropy from the target's distribution to the draft's, over all depths.

    loss = sum_j decay^j * mean_t( -sum_v p_target(v | tokens <= t+1+j) log p_draft_j(v | row t) ),
    divided by sum_j decay^j.

    Returns:
        Scalar float32.
    """
    forward, loss = draft.forward, torch.zeros(())
    for one in draft.passes(traces, rows, num_draft_tokens):
        for depth, hidden in zip(one.depths, one.hidden.unbind(2), strict=True):
            # The distribution of a token is what the target says at the position before it.
            final_hidden = predicted(traces.final_hidden, one.rows, depth - 1)
            with torch.no_grad():
                target_probabilities = target_head(final_hidden).softmax(dim=-1)
            share = len(one.rows) / len(rows)
            loss = loss + decay**depth * share * F.cross_entropy(
                forward.scores(hidden).float().flatten(0, 1), target_probabilities.flatten(0, 1)
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
    """Train a draft's weights in place on the target's traces, in shuffled epochs.

    A step trains on every row_stride-th row, the next step on the rows one further: where a row
    costs a draft much, as many rows of more sequences teach it more than neighbours would.
    """
    generator = torch.Generator().manual_seed(seed)
    num_traces = len(traces.token_ids)
    order = torch.empty(0, dtype=torch.int64)
    first_rows = itertools.cycle(range(row_stride))

    def batch_loss() -> Tensor:
        nonlocal order
        if len(order) < schedule.batch_size:
            order = torch.randperm(num_traces, generator=generator)
        batch, order = order[: schedule.batch_size], order[schedule.batch_size :]
        return distillation_loss(
            draft,
            traces[batch],
            scored_rows(traces, num_draft_tokens)[next(first_rows) :: row_stride],
            target_head,
            num_draft_tokens=num_draft_tokens,
            decay=decay,
        )

    return minimise(batch_loss, draft.weights.values(), schedule, label="draft")


def ship_draft(draft: Draft, config: Mapping[str, Any], folder: Path) -> Draft:
    """Write a draft in BF16 and read it back, so that its figures are those of what ships."""
    folder.mkdir()
    published = {
        name: weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        for name, weight in draft.published().items()
    }
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return shipped_draft(draft, folder)


def shipped_draft(draft: Draft, folder: Path) -> Draft:
    """A draft with the weights of a folder, BF16 values in float32; nothing trains any more."""
    weights = {name: weight.detach() for name, weight in draft.weights.items()}
    for name, weight in load_file(folder / "model.safetensors").items():
        shipped = weight.float() if weight.is_floating_point() else weight
        weights[draft.kind.family.canonical_name(name)] = shipped
    return dataclasses.replace(draft, weights=weights)
