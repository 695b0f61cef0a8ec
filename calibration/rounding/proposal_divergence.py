"""How far a draft's proposals are from those of the unquantized draft, and the gradient of that.

At most some rows of logits are held: a loss and its gradient with respect to the hidden
states are computed part by part, and only hidden states have an autograd graph.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.drafts.forward import DraftForward, DraftPass, positions
from ..passes.proposals import MAX_LOGITS
from .learned_state import LearningSettings
from .sequences import LearningSequences


class OwnRows:
    """The n of the R rows of a pass over B sequences that lie inside each, one after the other.

    The host knows which these are: nothing waits for a GPU.
    """

    def __init__(self, drafted: DraftPass, sequences: LearningSequences) -> None:
        self._shape = len(sequences.inside), len(drafted.rows)
        self._device = drafted.hidden.device
        step, total = sequences.rows.step, len(drafted.rows)
        spans = (
            ((span[0] - drafted.rows[0]) // step, (span[-1] - drafted.rows[0]) // step + 1)
            for span in sequences.inside
        )
        self._spans = [(min(max(a, 0), total), min(max(b, 0), total)) for a, b in spans]
        whole = all(span == (0, total) for span in self._spans)
        self._at = None if whole else self._places()

    def of(self, values: Tensor) -> Tensor:
        """[B, R, ...] -> [n, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._at is None else flat[self._at]

    def filled(self, values: Tensor) -> Tensor:
        """[n, ...] -> [B, R, ...], zeros elsewhere."""
        if self._at is not None:
            among = values.new_zeros(self._shape[0] * self._shape[1], *values.shape[1:])
            values = among.index_copy_(0, self._at, values)
        return values.view(*self._shape, *values.shape[1:])

    def sums(self, values: Tensor) -> Tensor:
        """[n] -> [B] float64, added up for each sequence."""
        return self.filled(values.double()).sum(1)

    def spread(self, values: Sequence[float]) -> Tensor:
        """One number per sequence -> [n] float32."""
        spans = zip(values, self._spans, strict=True)
        return torch.cat([torch.full((b - a,), x, device=self._device) for x, (a, b) in spans])

    def all_right(self) -> Tensor:
        """[n] bool, all True: nothing is wrong yet."""
        return torch.ones(sum(b - a for a, b in self._spans), dtype=torch.bool, device=self._device)

    def _places(self) -> Tensor:
        """[n] in the rows of all sequences."""
        rows = self._shape[1]
        return torch.cat(
            [positions(range(i * rows + a, i * rows + b), self._device)
             for i, (a, b) in enumerate(self._spans)]
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What two drafts propose from every row considered, summed."""

    rows: int
    accepted: int
    accepted_reference: int
    overlap: float


def passes_of(
    forward: DraftForward, sequences: LearningSequences, num_draft_tokens: int
) -> Iterator[DraftPass]:
    """The passes of a draft over sequences."""
    return forward.passes(
        sequences.hidden,
        sequences.token_ids,
        rows=sequences.rows,
        num_draft_tokens=num_draft_tokens,
    )


def backward_of_divergence(
    draft: DraftForward,
    reference: DraftForward,
    sequences: LearningSequences,
    *,
    num_draft_tokens: int,
    settings: LearningSettings,
    share: float,
) -> Tensor:
    """Add the gradient of some sequences' loss, times `share`, to what `draft` computes with.

    The loss of a sequence is the sum over rows and depths j of decay^j * reach * KL(reference ‖
    draft), divided by that of decay^j; reach is 1 where the reference had all earlier depths right,
    else `missed_weight`.
    """
    with torch.no_grad():
        unquantized = list(passes_of(reference, sequences, num_draft_tokens))
    norm = sum(settings.depth_decay**depth for depth in range(num_draft_tokens)) / share
    device = sequences.hidden.device
    total, hidden, gradients = torch.zeros((), dtype=torch.float64, device=device), [], []
    reached = torch.empty(0)
    for drafted, other in zip(
        passes_of(draft, sequences, num_draft_tokens), unquantized, strict=True
    ):
        rows = OwnRows(drafted, sequences)
        reached = reached if drafted.depths.start else rows.all_right()
        counts = rows.spread([1 / (norm * len(span)) for span in sequences.inside])
        loss, gradient, reached = _divergence(
            reference, settings, drafted.depths, rows.of(drafted.hidden), rows.of(other.hidden),
            rows.of(_recorded(drafted, sequences)), reached, counts,
        )  # fmt: skip
        total += loss
        hidden.append(drafted.hidden)
        gradients.append(rows.filled(gradient))
    torch.autograd.backward(hidden, gradients)
    return total


@torch.no_grad()
def agreement(
    draft: DraftForward,
    reference: DraftForward,
    sequences: LearningSequences,
    *,
    num_draft_tokens: int,
) -> list[Agreement]:
    """What a draft proposes along each sequence, compared with a reference and its head."""
    both = (reference, draft)
    zeros = torch.zeros(len(sequences.inside), dtype=torch.float64, device=sequences.hidden.device)
    overlap, accepted = zeros, [zeros] * 2
    alive: list[Tensor] = []
    passes = (passes_of(forward, sequences, num_draft_tokens) for forward in both)
    for together in zip(*passes, strict=True):
        first = together[0]
        rows = OwnRows(first, sequences)
        if first.depths.start == 0:
            alive = [rows.all_right() for _ in both]
        overlaps: list[Tensor] = []
        rights: list[list[Tensor]] = [[] for _ in both]
        hidden = (rows.of(each.hidden) for each in together)
        for *parts, tokens in _parts(reference, *hidden, rows.of(_recorded(first, sequences))):
            proposed: list[Tensor] = []
            for right, part in zip(rights, parts, strict=True):
                logits = _wide(reference.logits, part)
                right.append(_right(reference, logits, tokens))
                proposed.append(logits.softmax(-1))
            overlaps.append(torch.minimum(*proposed).sum(-1).sum(-1))
        overlap = overlap + rows.sums(torch.cat(overlaps))
        for i, right in enumerate(rights):
            run = _unbroken(alive[i], torch.cat(right))
            accepted[i] = accepted[i] + rows.sums(run.sum(1))
            alive[i] = run[:, -1]
    return [
        Agreement(
            rows=len(span), accepted=int(n), accepted_reference=int(of_reference), overlap=share
        )
        for span, of_reference, n, share in zip(
            sequences.inside,
            *(counts.tolist() for counts in accepted),
            overlap.tolist(),
            strict=True,
        )
    ]


def _divergence(
    forward: DraftForward, settings: LearningSettings, depths: range, hidden: Tensor, *of: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of weight * loss [], its gradient [n, D, W], and where all were right to the end [n].

    `hidden` [n, D, W]; `of` them the reference's hidden states [n, D, W], the recorded tokens
    [n, D], whether all depths before were right [n], and the weights of the rows [n].
    """
    decay = settings.depth_decay ** positions(depths, hidden.device)
    totals, gradients, runs = [], [], []
    for mine, its, recorded, before, count in _parts(forward, hidden, *of):
        with torch.no_grad():
            wanted = _wide(forward.scores, its).log_softmax(-1)
            run = _unbroken(before, _right(forward, wanted, recorded))
        reach = torch.cat((before[:, None], run[:, :-1]), dim=1)
        weight = torch.where(reach, 1.0, settings.missed_weight) * decay * count[:, None]
        leaf = mine.detach().requires_grad_()
        with torch.enable_grad():
            logprobs = _wide(forward.scores, leaf).log_softmax(-1)
            loss = (weight * (wanted.exp() * (wanted - logprobs)).sum(-1)).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        totals.append(loss.detach().double())
        gradients.append(gradient)
        runs.append(run[:, -1])
    return torch.stack(totals).sum(), torch.cat(gradients), torch.cat(runs)


def _recorded(drafted: DraftPass, sequences: LearningSequences) -> Tensor:
    """[B, R, D] tokens that a pass predicts."""
    device = sequences.token_ids.device
    rows = positions(drafted.rows, device)[:, None]
    return sequences.token_ids[:, rows + 2 + positions(drafted.depths, device)]


def _right(forward: DraftForward, logits: Tensor, recorded: Tensor) -> Tensor:
    """[R, D] bool: whether the most likely token is the recorded one."""
    return forward.to_target(logits.argmax(-1)) == recorded


def _unbroken(before: Tensor, right: Tensor) -> Tensor:
    """[R, D] bool: right at this depth and at all earlier ones; `before` [R]: in earlier passes."""
    return right.long().cumprod(1).bool() & before[:, None]


def _parts(forward: DraftForward, hidden: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of hidden states [n, D, W] and of what belongs to them, few enough for small logits."""
    together = max(1, MAX_LOGITS // (forward.num_logits * hidden.shape[1]))
    return zip(*(torch.split(x, together) for x in (hidden, *others)), strict=True)


def _wide(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Logits in float32 or wider, whatever the dtype of other products.

    Rounded to BF16, logits would move by more than what codes change in them.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
