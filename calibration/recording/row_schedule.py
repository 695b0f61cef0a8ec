"""Which prompts a batch reads together, and when ended rows give way to new ones."""

from collections.abc import Iterator, Sequence
from typing import Literal

Together = Literal["any lengths", "equal prompts", "equal lengths"]
"""What a target can continue together: prompts of any lengths; of any lengths, of which only equal
ones are read together (recurrent states would take padding in); or of equal lengths alone."""

_MAX_PADDING = 1 / 8
"""Share of what is read together."""
_REFILL, _SHRINK = 1 / 8, 1 / 4
"""Shares of ended rows at which new prompts are read, and at which the others move together."""


class Waiting:
    """Prompts that wait for a row, the longest first.

    So a batch that does not fit into memory fails at once, and a new prompt is never longer than
    the rows that it joins.

    Args:
        lengths: tokens of every prompt.
        max_tokens: that are read together, unless one prompt alone has more.
    """

    def __init__(self, lengths: Sequence[int], together: Together, max_tokens: int) -> None:
        self._lengths = lengths
        self._together = together
        self._max_tokens = max_tokens
        self._order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def __len__(self) -> int:
        return len(self._order)

    def entering(self, free: int) -> list[list[int]]:
        """Positions of the prompts that go into free rows, by groups that are read together."""
        first, lengths = self._order[:free], self._lengths
        if self._together == "equal lengths":
            first = [i for i in first if lengths[i] == lengths[first[0]]]
        self._order = self._order[len(first) :]
        return list(self._groups(first))

    def _groups(self, entering: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        for i in entering:
            if group and not self._fits(i, group):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _fits(self, one: int, group: Sequence[int]) -> bool:
        if self._together == "equal lengths":
            return True  # of one cache: what is too long is read in pieces
        read = self._lengths[group[0]] * (len(group) + 1)
        tokens = sum(self._lengths[i] for i in group) + self._lengths[one]
        padding = _MAX_PADDING if self._together == "any lengths" else 0
        return read <= self._max_tokens and read - tokens <= padding * read


def give_way(num_ended: int, num_rows: int, num_waiting: int, together: Together) -> bool:
    """Whether so many of the rows have ended that they leave now."""
    if num_ended == num_rows or together == "equal lengths":
        return num_ended == num_rows
    return num_ended >= num_rows * (_REFILL if num_waiting else _SHRINK)
