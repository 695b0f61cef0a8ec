"""How far a draft's proposals are from those of the unquantized one, and the gradient of that.

Logits are never held for more than some rows: a loss and its gradient with respect to the hidden
states are computed part by part, and only hidden states have a graph behind them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftForward
from ..passes.draft_pass import DraftPass, positions
from ..passes.predictions import MAX_LOGITS, draft_passes
from .sequences import LearningSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthWeights:
    """Of the loss: see `LearningSettings`."""

    decay: float
    missed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What two drafts propose from every row looked at, added up.

    Attributes:
        rows: how many.
        accepted: tokens in a row that the draft has right, over all rows.
        accepted_reference: likewise of the reference.
        overlap: sum over rows and depths of the sum of the smaller probabilities.
    """

    rows: int
    accepted: int
    accepted_reference: int
    overlap: float

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            rows=self.rows + other.rows,
            accepted=self.accepted + other.accepted,
            accepted_reference=self.accepted_reference + other.accepted_reference,
            overlap=self.overlap + other.overlap,
        )


def passes_of(
    forward: DraftForward, sequence: LearningSequence, num_draft_tokens: int
) -> Iterator[DraftPass]:
    """`draft_passes` of a sequence."""
    return draft_passes(
        forward,
        sequence.hidden,
        sequence.token_ids,
        rows=sequence.rows,
        num_draft_tokens=num_draft_tokens,
    )


def backward_of_divergence(
    draft: DraftForward,
    reference: DraftForward,
    sequence: LearningSequence,
    *,
    num_draft_tokens: int,
    weights: DepthWeights,
    share: float,
) -> float:
    """Add the gradient of one sequence's loss to what `draft` computes with.

    The loss is the sum over rows and depths j of decay^j * reach * KL(reference ‖ draft), divided
    by that of decay^j; reach is 1 where the reference had every depth before right, else `missed`.

    Args:
        draft: over weights some of which require gradients.
        reference: over the unquantized weights; head and last norm are the draft's too.
        sequence: of both.
        num_draft_tokens: K.
        weights: of depths.
        share: multiplies the loss.

    Returns:
        The loss, times `share`.

    Raises:
        CalibrationError: a draft computes NaN or infinity.
    """
    with torch.no_grad():
        taught = list(passes_of(reference, sequence, num_draft_tokens))
        hits = _hits(reference, taught, sequence, num_draft_tokens)
    decay = torch.tensor(
        [weights.decay**depth for depth in range(num_draft_tokens)], device=hits.device
    )
    reached = torch.cat((hits.new_ones(len(hits), 1), hits[:, :-1]), dim=1).cumprod(1).bool()
    by_depth = torch.where(reached, 1.0, weights.missed) * decay * share
    by_depth = by_depth / (decay.sum() * len(hits))
    total, hidden, gradients = 0.0, [], []
    for one, other in zip(passes_of(draft, sequence, num_draft_tokens), taught, strict=True):
        rows, depths = _place(one, sequence)
        loss, gradient = _divergence(
            reference, one.hidden[0], other.hidden[0], by_depth[rows, depths]
        )
        total += loss
        hidden.append(one.hidden)
        gradients.append(gradient[None])
    torch.autograd.backward(hidden, gradients)
    return total


@torch.no_grad()
def agreement(
    draft: DraftForward,
    reference: DraftForward,
    sequence: LearningSequence,
    *,
    num_draft_tokens: int,
) -> Agreement:
    """What a draft proposes along a sequence, beside a reference with the same head and last norm.

    Raises:
        CalibrationError: a draft computes NaN or infinity.
    """
    own = list(passes_of(draft, sequence, num_draft_tokens))
    taught = list(passes_of(reference, sequence, num_draft_tokens))
    overlap = 0.0
    for one, other in zip(own, taught, strict=True):
        for mine, its in _parts(reference, one.hidden, other.hidden):
            p, q = (_logits(reference, x).softmax(-1) for x in (mine, its))
            overlap += float(torch.minimum(p, q).sum())
    accepted, accepted_reference = (
        int(_hits(draft, passes, sequence, num_draft_tokens).cumprod(1).sum())
        for passes in (own, taught)
    )
    return Agreement(
        rows=len(sequence.rows),
        accepted=accepted,
        accepted_reference=accepted_reference,
        overlap=overlap,
    )


def _divergence(
    forward: DraftForward, hidden: Tensor, taught: Tensor, weights: Tensor
) -> tuple[float, Tensor]:
    """Sum of weight * KL(taught ‖ hidden), and its gradient with respect to `hidden`.

    Args:
        forward: the head of both.
        hidden: [R, D, W].
        taught: likewise, of the reference.
        weights: [R, D].
    """
    total, gradients = 0.0, []
    for mine, its, weight in _parts(forward, hidden, taught, weights):
        leaf = mine.detach().requires_grad_()
        with torch.no_grad():
            wanted = _logits(forward, its).log_softmax(-1)
        with torch.enable_grad():
            found = _logits(forward, leaf).log_softmax(-1)
            loss = (weight * (wanted.exp() * (wanted - found)).sum(-1)).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        total += float(loss.detach())
        gradients.append(gradient)
    return total, torch.cat(gradients).view(hidden.shape)


def _hits(
    forward: DraftForward,
    passes: Sequence[DraftPass],
    sequence: LearningSequence,
    num_draft_tokens: int,
) -> Tensor:
    """[R, K] int64: 1 where the most likely token is the recorded one."""
    hits = sequence.token_ids.new_empty(len(sequence.rows), num_draft_tokens)
    for one in passes:
        best = [_logits(forward, x).argmax(-1) for (x,) in _parts(forward, one.hidden)]
        rows = positions(one.rows, hits.device)[:, None]
        recorded = sequence.token_ids[0, rows + 2 + positions(one.depths, hits.device)]
        right = forward.to_target(torch.cat(best).view(recorded.shape)) == recorded
        hits[_place(one, sequence)] = right.to(hits.dtype)
    return hits


def _place(one: DraftPass, sequence: LearningSequence) -> tuple[slice, slice]:
    """Where a pass lies among all rows and depths of a sequence."""
    first = sequence.rows.index(one.rows.start)
    return (
        slice(first, first + len(one.rows)),
        slice(one.depths.start, one.depths.stop),
    )


def _parts(forward: DraftForward, hidden: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of hidden states [..., W], and of what belongs to them, so many that logits stay small.

    Others are [..., W] or [...].
    """
    together = max(1, MAX_LOGITS // forward.num_logits)
    flat = hidden.reshape(-1, hidden.shape[-1])
    beside = [x.reshape(len(flat), *x.shape[hidden.ndim - 1 :]) for x in others]
    return zip(*(torch.split(x, together) for x in (flat, *beside)), strict=True)


def _logits(forward: DraftForward, hidden: Tensor) -> Tensor:
    """In float32 at least, whatever products are otherwise of.

    Rounded to BF16, logits would move by more than what codes change in them.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = forward.logits(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
