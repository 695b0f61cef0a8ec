"""Choosing rows by some texts and looking at others: what a size covers of text it was not made by.

Crosswise: the prompts of a trace folder are dealt into parts, those that belong together into one;
each part is looked at under the order that the other parts give. What the order of all of them
covers of its own text is more than it will cover of a user's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CalibrationError
from .row_choice import FLOOR, RowOrder, row_order
from .token_counts import Counts, SaidText, TokenCounts, folds_of

NUM_FOLDS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowChooser:
    """How rows are ordered, whatever the texts; see `row_order`.

    Attributes:
        vocab_size: tokens of the target.
        offered: those that the draft has a row for; None = all.
    """

    vocab_size: int
    offered: tuple[int, ...] | None = None
    always: tuple[int, ...] = ()
    general: Counts | None = None
    floor: float = FLOOR

    @property
    def num_rows(self) -> int:
        """Of the draft as it is."""
        return self.vocab_size if self.offered is None else len(self.offered)

    def order(self, texts: Sequence[SaidText]) -> RowOrder:
        """By what the target said in these texts."""
        return row_order(
            TokenCounts.of(texts, self.vocab_size),
            offered=self.offered,
            always=self.always,
            general=self.general,
            floor=self.floor,
        )

    @property
    def method(self) -> str:
        """In words, for records."""
        ties = "prompts" if self.general is None else "general counts, then prompts"
        return (
            "tokens by how often the target said them, no category's coverage below"
            f" {self.floor:g} of that of all; those never said by {ties}, then by id"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutCoverage:
    """What each number of rows covers of texts that did not choose them.

    Attributes:
        categories: C names, ascending.
        covered: [C, n + 1] tokens that heads of 0 .. n rows can propose.
        totals: [C] tokens.
        never_said: tokens of the text that the choosing texts never said.
    """

    categories: tuple[str, ...]
    covered: Counts
    totals: Counts
    never_said: int

    def of(self, size: int) -> float:
        """Share of all tokens, in [0, 1]."""
        return float(self.covered[:, size].sum() / self.totals.sum())

    def by_category(self, size: int) -> dict[str, float]:
        """Share of the tokens of each category that has any."""
        pairs = zip(self.categories, self.covered[:, size], self.totals, strict=True)
        return {name: float(covered / total) for name, covered, total in pairs if total}

    def least_size(self, share: float) -> int | None:
        """Rows that are enough for that share; None where all of them are not."""
        enough = self.covered.sum(axis=0) >= share * self.totals.sum() * (1 - 1e-12)
        return int(enough.argmax()) if enough.any() else None


def held_out_coverage(chooser: RowChooser, texts: Sequence[SaidText]) -> HeldOutCoverage:
    """Coverage of the texts, each part of them under the order that the other parts give.

    Raises:
        CalibrationError: see `crosswise`.
    """
    orders, of_text = crosswise(chooser, texts)
    categories = tuple(sorted({text.category for text in texts}))
    covered = np.zeros((len(categories), chooser.num_rows + 1), dtype=np.int64)
    totals = np.zeros(len(categories), dtype=np.int64)
    never_said = 0
    for number, order in enumerate(orders):
        own = [text for text, fold in zip(texts, of_text, strict=True) if fold == number]
        others = [text for text, fold in zip(texts, of_text, strict=True) if fold != number]
        counts = TokenCounts.of(own, chooser.vocab_size)
        said = TokenCounts.of(others, chooser.vocab_size).pooled > 0
        never_said += int(counts.pooled[~said].sum())
        for category, of_category in zip(counts.categories, counts.by_category, strict=True):
            row = categories.index(category)
            covered[row] += order.covered(of_category)
            totals[row] += of_category.sum()
    return HeldOutCoverage(
        categories=categories, covered=covered, totals=totals, never_said=never_said
    )


def crosswise(
    chooser: RowChooser, texts: Sequence[SaidText]
) -> tuple[list[RowOrder], Sequence[int]]:
    """The order that the texts outside each part give, and the part of each text.

    Raises:
        CalibrationError: the texts are one group, so that nothing can be held out.
    """
    groups = len({text.group for text in texts})
    if groups < 2:
        raise CalibrationError(
            "--traces",
            f"its {len(texts)} prompts belong together, so none of them can be held out",
            fix="record traces of more prompts",
        )
    number = min(NUM_FOLDS, groups)
    of_text = folds_of(texts, number)
    orders = [
        chooser.order([text for text, fold in zip(texts, of_text, strict=True) if fold != part])
        for part in range(number)
    ]
    return orders, of_text
