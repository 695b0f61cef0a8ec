"""How far a draft's proposals are from what it learns, and the gradient of that.

It learns the proposals of the unquantized draft, or with a teacher also what the target emitted.

Logits are never held for more than some rows: a loss and its gradient with respect to the hidden
states are computed part by part, and only hidden states have a graph behind them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from ...quantize.drafts.forward import DraftForward, DraftPass, positions
from ..passes.predictions import MAX_LOGITS, draft_ids_of
from .learning_settings import Teaching
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
        accepted_reference: the same of the reference.
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
    """The passes of a draft over a sequence."""
    return forward.passes(
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
    teaching: Teaching | None = None,
) -> float:
    """Add the gradient of one sequence's loss to what `draft` computes with.

    The loss is the sum over rows and depths j of decay^j * reach * KL(reference ‖ draft), divided
    by that of decay^j; reach is 1 where the reference had every depth before right, else `missed`.
    With a teacher, anchor * KL - log softmax(logits / temperature)[recorded token] stands for the
    KL, and reach asks for what the draft itself had right; of a token that the draft cannot propose
    there is nothing to learn but the KL.

    Args:
        draft: over weights some of which require gradients.
        reference: over the unquantized weights; head and last norm are the draft's too.
        sequence: of both.
        num_draft_tokens: K.
        weights: of depths.
        share: multiplies the loss.
        teaching: None = the reference alone is learned.

    Returns:
        The loss, times `share`.

    Raises:
        ForwardError: a draft computes NaN or infinity.
    """
    with torch.no_grad():
        taught = list(passes_of(reference, sequence, num_draft_tokens))
    norm = len(sequence.rows) * sum(weights.decay**depth for depth in range(num_draft_tokens))
    total, hidden, gradients = 0.0, [], []
    reached = torch.empty(0)
    for one, other in zip(passes_of(draft, sequence, num_draft_tokens), taught, strict=True):
        reached = reached if one.depths.start else _all_rows(one)
        loss, gradient, reached = _divergence(
            reference, one, other.hidden[0], _recorded(one, sequence), reached, weights, teaching
        )
        total += loss * share / norm
        hidden.append(one.hidden)
        gradients.append(gradient[None] * (share / norm))
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
        ForwardError: a draft computes NaN or infinity.
    """
    accepted, overlap = [0, 0], 0.0
    alive: list[Tensor] = []
    passes = (passes_of(forward, sequence, num_draft_tokens) for forward in (draft, reference))
    for one, other in zip(*passes, strict=True):
        recorded = _recorded(one, sequence)
        if one.depths.start == 0:
            alive = [_all_rows(one), _all_rows(one)]
        rights: tuple[list[Tensor], list[Tensor]] = ([], [])
        for mine, its, tokens in _parts(reference, one.hidden[0], other.hidden[0], recorded):
            logits = [_wide(reference.logits, hidden) for hidden in (mine, its)]
            p, q = (found.softmax(-1) for found in logits)
            overlap += float(torch.minimum(p, q).sum())
            for right, found in zip(rights, logits, strict=True):
                right.append(_right(reference, found, tokens))
        for i, right in enumerate(rights):
            run = _unbroken(alive[i], torch.cat(right))
            accepted[i] += int(run.sum())
            alive[i] = run[:, -1]
    return Agreement(
        rows=len(sequence.rows),
        accepted=accepted[0],
        accepted_reference=accepted[1],
        overlap=overlap,
    )


def _divergence(
    forward: DraftForward,
    one: DraftPass,
    taught: Tensor,
    recorded: Tensor,
    reached: Tensor,
    weights: DepthWeights,
    teaching: Teaching | None,
) -> tuple[float, Tensor, Tensor]:
    """Sum of weight * loss over a pass, and its gradient with respect to `hidden`.

    Args:
        forward: the head of both.
        one: the pass.
        taught: [R, D, W], hidden states of the reference.
        recorded: [R, D] tokens there.
        reached: [R], whether all depths before the pass were right.
        weights: of depths.
        teaching: as above.

    Returns:
        The sum, the gradient [R, D, W], and `reached` after the pass.
    """
    decay = torch.tensor([weights.decay**depth for depth in one.depths], device=taught.device)
    total, gradients, runs = 0.0, [], []
    for mine, its, tokens, before in _parts(forward, one.hidden[0], taught, recorded, reached):
        leaf = mine.detach().requires_grad_()
        with torch.no_grad():
            wanted = _wide(forward.scores, its).log_softmax(-1)
        with torch.enable_grad():
            logits = _wide(forward.scores, leaf)
            each = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
            if teaching is not None:
                surprise = _surprise(forward, logits / teaching.temperature, tokens)
                each = teaching.anchor * each + surprise
        with torch.no_grad():
            judged = wanted if teaching is None else logits
            run = _unbroken(before, _right(forward, judged, tokens))
            counts = torch.cat((before[:, None], run[:, :-1]), dim=1)
            weight = torch.where(counts, 1.0, weights.missed) * decay
        with torch.enable_grad():
            loss = (weight * each).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        total += float(loss.detach())
        gradients.append(gradient)
        runs.append(run[:, -1])
    return total, torch.cat(gradients), torch.cat(runs)


def _surprise(forward: DraftForward, logits: Tensor, recorded: Tensor) -> Tensor:
    """[R, D] cross-entropy of the recorded tokens; 0 for those that the draft cannot propose."""
    draft_ids = draft_ids_of(forward, recorded)[recorded]
    surprise = F.cross_entropy(
        logits.flatten(0, -2), draft_ids.flatten(), ignore_index=-1, reduction="none"
    )
    return surprise.view(recorded.shape)


def _recorded(one: DraftPass, sequence: LearningSequence) -> Tensor:
    """[R, D] tokens that a pass predicts."""
    device = sequence.token_ids.device
    rows = positions(one.rows, device)[:, None]
    return sequence.token_ids[0, rows + 2 + positions(one.depths, device)]


def _right(forward: DraftForward, logits: Tensor, recorded: Tensor) -> Tensor:
    """[R, D] bool: whether the most likely token is the recorded one."""
    return forward.to_target(logits.argmax(-1)) == recorded


def _unbroken(before: Tensor, right: Tensor) -> Tensor:
    """[R, D] bool: right at this depth and at all before; `before` [R]: in the passes before."""
    return right.long().cumprod(1).bool() & before[:, None]


def _all_rows(one: DraftPass) -> Tensor:
    """[R] bool: nothing is wrong yet."""
    return torch.ones(len(one.rows), dtype=torch.bool, device=one.hidden.device)


def _parts(forward: DraftForward, hidden: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of hidden states [R, D, W] and of what belongs to them, so few that logits are small."""
    together = max(1, MAX_LOGITS // (forward.num_logits * hidden.shape[1]))
    return zip(*(torch.split(x, together) for x in (hidden, *others)), strict=True)


def _wide(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Logits in float32 at least, whatever products are otherwise of.

    Rounded to BF16, logits would move by more than what codes change in them.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
