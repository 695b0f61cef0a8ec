"""One order of a target's tokens, by which rows a head keeps: every size is a prefix of it.

Tokens come by how often the target said them, all categories together; but while the coverage of
some category lies below `floor` times that of all, the next token is the one which that category
says most. So a category with little text does not starve.

Tokens that were never said stand behind: by general counts of some other text where there are some,
then by how often they stand in prompts, then by id (ids of a BPE tokenizer are in the order of its
merges). These break ties and weigh nothing beside what was said: added to it with a weight, each of
them covered less held-out text, or as much (docs/vocabulary.md has the figures).

Pure arithmetic: it knows neither drafts nor files, and draws no random number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .token_counts import Counts, TokenCounts

FLOOR = 0.95
"""The least coverage of a category, relative to that of all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOrder:
    """The order in which tokens get a row.

    Attributes:
        token_ids: [n] int64, every token that may have a row, once; the first ones are kept.
        ranks: [V] int64, the place of each token in it, n for a token without one.
    """

    token_ids: NDArray[np.int64]
    ranks: NDArray[np.int64]

    def first(self, size: int) -> tuple[int, ...]:
        """The tokens of a head with `size` rows, ascending."""
        return tuple(sorted(self.token_ids[:size].tolist()))

    def covered(self, counts: Counts) -> Counts:
        """Tokens of [V] counts that heads of 0 .. n rows can propose: [n + 1], ascending."""
        reached: Counts = np.concatenate(([0], np.cumsum(counts[self.token_ids])))
        return reached


def row_order(
    said: TokenCounts,
    *,
    offered: Sequence[int] | None = None,
    always: Sequence[int] = (),
    general: Counts | None = None,
    floor: float = FLOOR,
) -> RowOrder:
    """Order the tokens.

    Args:
        said: by the target, at least one token.
        offered: those that the draft has a row for; None = all.
        always: tokens that every head keeps, such as the end of text; others than the offered are
            left out.
        general: [V] counts of some other text, of the same tokenizer; None = there are none.
        floor: see `FLOOR`, in [0, 1]; 0 = frequency alone.
    """
    vocab_size = said.by_category.shape[1]
    may_have_row = np.zeros(vocab_size, dtype=bool)
    may_have_row[slice(None) if offered is None else list(offered)] = True
    order = [token for token in dict.fromkeys(always) if may_have_row[token]]
    may_have_row[order] = False
    other = np.zeros(vocab_size, dtype=np.int64) if general is None else general
    by_weight = np.lexsort((np.arange(vocab_size), -said.of_prompts, -other, -said.pooled))
    by_weight = by_weight[may_have_row[by_weight]]
    spoken = np.count_nonzero(said.pooled[by_weight])
    _Chooser(said, by_weight[:spoken], order).choose(floor)
    order += by_weight[spoken:].tolist()
    token_ids = np.array(order, dtype=np.int64)
    ranks = np.full(vocab_size, len(token_ids), dtype=np.int64)
    ranks[token_ids] = np.arange(len(token_ids))
    return RowOrder(token_ids=token_ids, ranks=ranks)


class _Chooser:
    """Puts tokens that were said into an order, one after the other.

    Args:
        candidates: [n] tokens that were said, by weight.
        order: to which they are appended.
    """

    def __init__(self, said: TokenCounts, candidates: NDArray[np.int64], order: list[int]) -> None:
        self._counts = said.by_category
        self._totals = np.maximum(said.by_category.sum(axis=1), 1)
        self._order = order
        self._reached = said.by_category[:, order].sum(axis=1)
        self._number = len(order) + len(candidates)
        self._taken = set(order)
        # By weight in all, then by what each category says of them; of equal ones by weight in all.
        self._queues = [candidates.tolist()]
        for own in said.by_category[:, candidates]:
            best = np.argsort(-own, kind="stable")
            self._queues.append(candidates[best[: np.count_nonzero(own)]].tolist())
        for queue in self._queues:
            queue.reverse()

    def choose(self, floor: float) -> None:
        """Append all candidates."""
        total = int(self._totals.sum())
        while len(self._order) < self._number:
            shares = self._reached / self._totals
            starved = np.flatnonzero(shares < floor * self._reached.sum() / total)
            for category in starved[np.argsort(shares[starved], kind="stable")]:
                if self._took(self._queues[1 + category]):
                    break
            else:
                self._took(self._queues[0])

    def _took(self, queue: list[int]) -> bool:
        """Whether there was one left to take."""
        while queue and queue[-1] in self._taken:
            queue.pop()
        if not queue:  # what else a category says, the draft has no rows for
            return False
        token = queue.pop()
        self._taken.add(token)
        self._order.append(token)
        self._reached = self._reached + self._counts[:, token]
        return True
