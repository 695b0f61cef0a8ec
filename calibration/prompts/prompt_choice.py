"""Which prompts are taken out of many."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...recipes.bounds import AT_LEAST_1
from ...recipes.errors import short
from ..errors import LineProblem, PromptError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """What is taken out of a prompt file or a data set.

    Attributes:
        split: of a data set, [CONFIG/]SPLIT; None where there is one alone.
        column: that holds the prompts; None = the one that is known.
        num_prompts: to take; None = all.
        seed: draws which ones.
    """

    split: str | None = None
    column: str | None = None
    num_prompts: int | None = None
    seed: int = 0

    def order(self, count: int) -> Sequence[int]:
        """Places 0 ... count - 1 in the order in which they are drawn; in their own for all.

        It depends on seed and place alone, so whoever takes more gets these and others.
        """
        if self.num_prompts is None:
            return range(count)

        def drawn(place: int) -> bytes:
            return hashlib.sha256(f"{self.seed}/{place}".encode()).digest()

        return sorted(range(count), key=drawn)

    def check(self, where: object, count: int) -> None:
        """Refuse to take more than there are.

        Raises:
            PromptError: `count` is below what is asked for.
        """
        AT_LEAST_1.check(PromptError, "num_prompts", self.num_prompts, fix="give a larger number")
        if self.num_prompts is not None and count < self.num_prompts:
            raise PromptError(
                where,
                f"expected at least {self.num_prompts} prompts, got {count}",
                fix=f"take fewer: --num-prompts {count}" if count else "give another source",
            )


EVERY_PROMPT = PromptChoice()


def of_column(row: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """A row as if the column were one of those that are known: its text is a turn of the user.

    Raises:
        LineProblem: there is none, or it holds neither text nor texts nor messages.
    """
    if column is None:
        return row
    if column not in row:
        raise LineProblem(f"no column {short(column)}; there are {', '.join(sorted(row))}")
    found = row[column]
    beside = {key: row[key] for key in ("id", "category", "cluster") if key in row}
    if isinstance(found, str):
        return {**beside, "prompt": found}
    if isinstance(found, list) and found and isinstance(found[0], str):
        return {**beside, "turns": found}
    if isinstance(found, list):
        return {**beside, "conversations": found}
    raise LineProblem(f"{column}: expected text, texts or messages, got {short(found)}")
