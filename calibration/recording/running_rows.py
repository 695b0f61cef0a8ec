"""The rows of a batch that a target continues: what is known of them here, and on its device."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """A row: the prompt's position and length, the most new tokens, and those that it has."""

    position: int
    length: int
    limit: int
    num_new: int = 1
    ended: bool = False

    @property
    def num_read(self) -> int:
        """Tokens of it that the target has read."""
        return self.length + self.num_new - 1


@dataclass(slots=True, kw_only=True)
class RowsOnDevice:
    """The rows' state where the target runs, [R] each.

    Attributes:
        slot: of the kept rows.
        at: tokens read, the entry of the next. last: the entry where an ended row stays.
        first: the entry that the first new token is chosen from.
        unread: the newest token. ended: there was an end of text.
        draws: [R, limit + 1]; None where greedy.
    """

    slot: Tensor
    at: Tensor
    last: Tensor
    first: Tensor
    unread: Tensor
    ended: Tensor
    draws: Tensor | None

    def select(self, rows: Tensor) -> "RowsOnDevice":
        """The state of some rows."""
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            state = getattr(self, field.name)
            kept[field.name] = None if state is None else state[rows]
        return RowsOnDevice(**kept)
