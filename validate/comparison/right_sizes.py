"""With how many rows a draft's proposals are right: every size of the head in one replay.

What a draft reads along recorded tokens does not depend on the rows of its head. So with the first
n rows of an order it proposes the recorded token exactly if n is enough for a row of that token,
and not enough for one of any token whose logit is larger:

    rank(recorded) < n <= min over tokens u that win against it of rank(u)

Of equal logits the one with the lower draft id wins, as in argmax; a cut head has its rows in
the order of the target's ids, so here it is the lower target id. A verify step with n rows accepts
the proposals up to the first depth at which n is outside these bounds; the intersection of those
up to a depth is kept. Products equal those of a really cut head, except for the last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...calibration.passes.draft_inputs import (
    MAX_TOKENS,
    TraceBatch,
    batches_of,
    first_hidden_of_batch,
    read_ahead,
    rows_along,
    work_of,
)
from ...calibration.passes.proposals import MAX_LOGITS, CountedRows, draft_ids_of
from ...calibration.traces.trace_folder import TraceFolder
from ...calibration.vocabulary.row_choice import RowOrder
from ...quantize.drafts.forward import BLOCK_ROWS
from ...quantize.stored.loading import LoadedDraft
from ...recipes.listener import Progress, unseen
from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.trace_replay import check_drafts, decoding_steps

_COMPARED = 2**20
"""Logits that are compared at a time: these stay in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightSizes:
    """[R, K] int32 by row and depth: sizes above < n <= up_to are right up to that depth."""

    above: Tensor
    up_to: Tensor

    def counts(self, size: int) -> AcceptanceCounts:
        """Counts of the verify steps of a draft whose head has `size` rows."""
        right = (self.above < size) & (size <= self.up_to)
        accepted: list[int] = right.sum(dim=1).tolist()
        return AcceptanceCounts.of(decoding_steps(accepted), right.shape[1])


@torch.inference_mode()
def right_sizes(
    draft: LoadedDraft,
    traces: TraceFolder,
    orders: Sequence[RowOrder],
    of_prompt: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    batch_size: int | None = None,
    max_tokens: int = MAX_TOKENS,
    on_progress: Progress = unseen,
) -> list[tuple[RightSizes, ...]]:
    """For every prompt, by each of its orders, the sizes with which proposals are right."""
    check_drafts([draft], traces, num_draft_tokens)
    entries = traces.manifest.prompts
    most = batch_size if draft.rounds_alone else 1
    batches = batches_of(entries, max_tokens=max_tokens, max_prompts=most)
    work = [work_of([entries[i] for i in places], num_draft_tokens) for places in batches]
    rows_of = _Orders(draft, orders)
    by_place: dict[int, tuple[RightSizes, ...]] = {}
    read = read_ahead(traces, batches, draft.device)
    for number, (places, batch) in enumerate(zip(batches, read, strict=True), start=1):
        asked = torch.tensor([list(of_prompt[place]) for place in places], device=draft.device)
        of_batch = _of_batch(draft, traces, batch, rows_of, asked, num_draft_tokens)
        by_place.update(zip(places, of_batch, strict=True))
        on_progress(sum(work[:number]), sum(work))
    return [sizes for _, sizes in sorted(by_place.items())]


class _Orders:
    """The ranks of a draft's rows in several orders, by draft id and by target id."""

    def __init__(self, draft: LoadedDraft, orders: Sequence[RowOrder]) -> None:
        device = draft.device
        ids = torch.arange(draft.forward.num_logits, device=device)
        self.target_ids = draft.forward.to_target(ids)
        ranks = torch.stack([torch.from_numpy(order.ranks) for order in orders])
        self.by_token = ranks.to(device, torch.int32)  # [O, V]
        self.by_row = self.by_token[:, self.target_ids].contiguous()  # [O, draft vocabulary]
        every = torch.arange(self.by_token.shape[1], device=device)
        self.draft_ids = draft_ids_of(draft.forward, every)

    def least_winner(self, logits: Tensor, recorded: Tensor, asked: Tensor) -> Tensor:
        """[n, J] int32, the least rank among tokens that win against the recorded one.

        0 where that has no row; more than any rank where nothing wins against it. `asked` [n, J]
        says which orders.
        """
        row_ids = self.draft_ids[recorded]
        logit = logits.gather(1, row_ids.clamp(min=0)[:, None])
        none = self.by_token.shape[1]
        least = torch.full(asked.shape, none, dtype=torch.int32, device=logits.device)
        step = max(1, _COMPARED // len(logits))
        wanted = [(o, j) for j in range(asked.shape[1]) for o in set(asked[:, j].tolist())]
        at = {(o, j): (asked[:, j] == o).nonzero()[:, 0] for o, j in wanted}
        for start in range(0, logits.shape[1], step):
            part = slice(start, start + step)
            some, ids = logits[:, part], self.target_ids[part]
            wins = (some > logit) | ((some == logit) & (ids < recorded[:, None]))
            for (o, j), rows in at.items():
                ranks = self.by_row[o, part].expand(len(rows), -1)
                first = ranks.masked_fill(~wins[rows], none).amin(1)
                least[rows, j] = torch.minimum(least[rows, j], first)
        return least.masked_fill((row_ids < 0)[:, None], 0)


def _of_batch(
    draft: LoadedDraft,
    traces: TraceFolder,
    batch: TraceBatch,
    orders: _Orders,
    asked: Tensor,
    num_draft_tokens: int,
) -> Iterator[tuple[RightSizes, ...]]:
    ranges = [rows_along(trace, num_draft_tokens) for trace in batch]
    rows = range(min(r.start for r in ranges), max(r.stop for r in ranges))
    shape = (len(batch), len(rows), num_draft_tokens, asked.shape[1])
    above = torch.full(shape, orders.by_token.shape[1], dtype=torch.int32, device=draft.device)
    up_to = torch.zeros_like(above)
    looked_at = CountedRows(ranges if draft.rounds_alone else None)
    token_ids = batch.token_ids
    for drafted in draft.forward.passes(
        first_hidden_of_batch(draft, traces, batch),
        token_ids,
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        block_rows=min(BLOCK_ROWS, max(1, MAX_TOKENS // len(batch))),
        alive=looked_at.alive,
    ):
        at = slice(drafted.rows.start - rows.start, drafted.rows.stop - rows.start)
        after = token_ids[:, drafted.rows.start + 2 :].unfold(1, num_draft_tokens, 1)
        of_rows = asked[:, None].expand(-1, len(drafted.rows), -1)
        for depth in drafted.depths:
            if not looked_at.any_in(drafted, depth):
                break
            states = looked_at.states(drafted, depth)
            recorded = looked_at.of(after[:, : len(drafted.rows), depth])
            wanted = looked_at.of(of_rows)
            top, least = _compared(draft, orders, states, recorded, wanted)
            own_rank = orders.by_token[wanted, recorded[:, None]]
            if depth > 0:
                own_rank = torch.maximum(own_rank, looked_at.of(above[:, at, depth - 1]))
                least = torch.minimum(least, looked_at.of(up_to[:, at, depth - 1]))
            looked_at.put(above[:, at, depth], own_rank)
            looked_at.put(up_to[:, at, depth], least)
            possible = (own_rank < least).any(1)
            looked_at.go_on(drafted, states=states, top=top, possible=possible)
    bounds = torch.stack((above, up_to)).cpu()
    for i, one_rows in enumerate(ranges):
        part = slice(one_rows.start - rows.start, one_rows.stop - rows.start)
        yield tuple(
            RightSizes(above=bounds[0, i, part, :, j], up_to=bounds[1, i, part, :, j])
            for j in range(asked.shape[1])
        )


def _compared(
    draft: LoadedDraft, orders: _Orders, states: Tensor, recorded: Tensor, asked: Tensor
) -> tuple[Tensor, Tensor]:
    """[n] the largest logits, and [n, J] of `_Orders.least_winner`, some rows at a time."""
    together = max(1, MAX_LOGITS // draft.forward.num_logits)
    tops, least = [], []
    for start in range(0, len(states), together):
        part = slice(start, start + together)
        logits = draft.forward.logits(states[part])
        tops.append(logits.amax(-1))
        least.append(orders.least_winner(logits, recorded[part], asked[part]))
    return torch.cat(tops), torch.cat(least)
