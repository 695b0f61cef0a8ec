"""Which tokens a head keeps rows for: what a target says, one order of them, and their coverage.

Tokens come by how often the target said them, in all categories together; but while the coverage of
some category is below `floor` times the overall coverage, the next token is the one that this
category says most. Tokens that were never said come last: by general counts of other text if
given, then by how often they occur in prompts, then by id (ids of a BPE tokenizer are in
the order of its merges). These only break ties (docs/vocabulary.md has the figures).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...recipes.errors import CalibrationError, short
from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_json, reading
from ..traces.related_prompts import related_groups, text_of
from ..traces.trace_folder import TraceFolder

# A verify step follows a token that is already committed, so the first token of a continuation,
# which comes from the prefill, is never proposed; all later ones are, and are counted. Tokens of
# prompts are not: a draft reads them through its embedding, which a cut of the head does not touch,
# and what users write is not what a target answers. They only decide which of the tokens that were
# never said come first.

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaidText:
    """What the target said on one prompt."""

    id: str
    category: str
    group: int  # the same for prompts that belong together
    prompt: NDArray[np.int64]
    token_ids: NDArray[np.int64]  # that a draft would have proposed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCounts:
    """How often each token was said, [C, V] int64 by category, and occurs in prompts, [V]."""

    categories: tuple[str, ...]
    by_category: Counts
    of_prompts: Counts

    @classmethod
    def of(cls, texts: Collection[SaidText], vocab_size: int) -> "TokenCounts":
        """The counts of some texts, of a target with this many tokens."""
        categories = tuple(sorted({text.category for text in texts}))
        by_category = np.zeros((len(categories), vocab_size), dtype=np.int64)
        read = np.zeros(vocab_size, dtype=np.int64)
        for text in texts:
            np.add.at(by_category[categories.index(text.category)], text.token_ids, 1)
            np.add.at(read, text.prompt, 1)
        return cls(categories=categories, by_category=by_category, of_prompts=read)

    @property
    def pooled(self) -> Counts:
        """[V] over all categories."""
        sums: Counts = self.by_category.sum(axis=0)
        return sums


def said_texts(traces: TraceFolder) -> list[SaidText]:
    """What the target said on every prompt, in order; reads only token ids."""
    read = [(entry, ids.numpy().astype(np.int64)) for entry, ids in traces.token_ids()]
    groups = related_groups([text_of(entry, ids.tolist()) for entry, ids in read])
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    return [
        SaidText(
            id=entry.id,
            category=entry.category,
            group=group_of[place],
            prompt=ids[: entry.prompt_length],
            token_ids=ids[entry.prompt_length + 1 :],
        )
        for place, (entry, ids) in enumerate(read)
    ]


def folds_of(texts: Sequence[SaidText], number: int) -> list[int]:
    """The fold of every text: groups stay together, and each category is spread over all folds."""
    first = {text.group: text.category for text in reversed(texts)}
    fold_of_group: dict[int, int] = {}
    for place, group in enumerate(sorted(first, key=lambda group: (first[group], group))):
        fold_of_group[group] = place % number
    return [fold_of_group[text.group] for text in texts]


_LARGEST = 2**53
_FORM = "write one JSON array with the count of every token of the target, token 0 first"


def read_general_counts(path: Path, vocab_size: int) -> Counts:
    """[vocab_size] int64, with at least one above 0."""
    with reading(path, CalibrationError, _FORM):
        counts = parse_json(read_text(path))
    if not isinstance(counts, list):
        raise CalibrationError(path, f"expected a JSON array, got {short(counts)}", fix=_FORM)
    for token, count in enumerate(counts):
        if type(count) is not int or not 0 <= count < _LARGEST:
            what = f"token {token}: expected a whole number from 0 on, got {short(count)}"
            raise CalibrationError(path, what, fix=_FORM)
    if len(counts) != vocab_size:
        raise CalibrationError(
            path,
            f"expected {vocab_size:,} counts, one for each token of the target, got"
            f" {len(counts):,}",
            fix="count with the tokenizer of the target, whose config.json says vocab_size",
        )
    if not any(counts):
        raise CalibrationError(path, "every count is 0", fix="count the tokens of some text")
    return np.array(counts, dtype=np.int64)


FLOOR = 0.95  # the least coverage of a category, relative to the overall coverage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOrder:
    """The order in which tokens get a row, each once; the first ones are kept."""

    token_ids: NDArray[np.int64]  # [n] int64
    ranks: NDArray[np.int64]  # [V] int64, places in it, n for a token without one

    def first(self, size: int) -> tuple[int, ...]:
        """The tokens of a head with `size` rows, ascending."""
        return tuple(sorted(self.token_ids[:size].tolist()))

    def covered(self, counts: Counts) -> Counts:
        """Tokens of [V] counts that heads of 0 .. n rows can propose: [n + 1], ascending."""
        reached: Counts = np.concatenate(([0], np.cumsum(counts[self.token_ids])))
        return reached


def _put_in_order(
    token_counts: TokenCounts, candidates: NDArray[np.int64], order: list[int], floor: float
) -> None:
    """Append candidates [n], by weight, to an order, one after the other."""
    counts = token_counts.by_category
    totals, reached = np.maximum(counts.sum(axis=1), 1), counts[:, order].sum(axis=1)
    total, taken = int(totals.sum()), set(order)
    # By weight overall, then by each category's counts; ties by weight overall.
    queues = [candidates[::-1].tolist()]
    for of_category in counts[:, candidates]:
        best = np.argsort(-of_category, kind="stable")[: np.count_nonzero(of_category)]
        queues.append(candidates[best][::-1].tolist())
    for _ in candidates:
        shares = reached / totals
        starved = np.flatnonzero(shares < floor * reached.sum() / total)
        by_share = starved[np.argsort(shares[starved], kind="stable")]
        for queue in (*(queues[1 + category] for category in by_share), queues[0]):
            while queue and queue[-1] in taken:
                queue.pop()
            if queue:  # the draft has no rows for what else the category says
                token = queue.pop()
                break
        taken.add(token)
        order.append(token)
        reached = reached + counts[:, token]


# Crosswise: the prompts of a trace folder are divided into parts, related ones into the same
# part; each part is evaluated under the order from the other parts. What the order from all of
# them covers of its own text is more than it will cover of a user's.

NUM_FOLDS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowChooser:
    """How rows are ordered, for any texts."""

    vocab_size: int
    offered: Sequence[int] | None = None  # tokens with a row; None = all
    always: Sequence[int] = ()  # kept by every head, such as the end of text
    general: Counts | None = None  # [V] from other text, with the same tokenizer
    floor: float = FLOOR

    @property
    def num_rows(self) -> int:
        """Rows of the draft as it is."""
        return self.vocab_size if self.offered is None else len(self.offered)

    def order(self, texts: Sequence[SaidText]) -> RowOrder:
        """Order by what the target said in these texts."""
        return self.order_of(TokenCounts.of(texts, self.vocab_size))

    def order_of(self, counts: TokenCounts) -> RowOrder:
        """Order by how often each token was said."""
        may_have_row = np.zeros(self.vocab_size, dtype=bool)
        may_have_row[slice(None) if self.offered is None else list(self.offered)] = True
        order = [token for token in dict.fromkeys(self.always) if may_have_row[token]]
        may_have_row[order] = False
        ids = np.arange(self.vocab_size)
        other = 0 * ids if self.general is None else self.general
        by_weight = np.lexsort((ids, -counts.of_prompts, -other, -counts.pooled))
        by_weight = by_weight[may_have_row[by_weight]]
        spoken = np.count_nonzero(counts.pooled[by_weight])
        _put_in_order(counts, by_weight[:spoken], order, self.floor)
        order += by_weight[spoken:].tolist()
        token_ids = np.array(order, dtype=np.int64)
        ranks = np.full(self.vocab_size, len(token_ids), dtype=np.int64)
        ranks[token_ids] = np.arange(len(token_ids))
        return RowOrder(token_ids=token_ids, ranks=ranks)

    @property
    def method(self) -> str:
        """The method in words, for records."""
        ties = "prompts" if self.general is None else "general counts, then prompts"
        return (
            "tokens by how often the target said them, no category's coverage below"
            f" {self.floor:g} of that of all; those never said by {ties}, then by id"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutCoverage:
    """What each number of rows covers of texts that did not choose them."""

    categories: tuple[str, ...]
    covered: Counts  # [C, n + 1] tokens that heads of 0 .. n rows can propose
    totals: Counts  # [C] of all tokens
    never_said: int

    def of(self, size: int) -> float:
        """Share of all tokens, in [0, 1]."""
        return float(self.covered[:, size].sum() / self.totals.sum())

    def by_category(self, size: int) -> dict[str, float]:
        """Share of the tokens of each category that has any."""
        pairs = zip(self.categories, self.covered[:, size], self.totals, strict=True)
        return {name: float(covered / total) for name, covered, total in pairs if total}

    def least_size(self, share: float) -> int | None:
        """The rows that are enough for that share; None where even all of them are not."""
        enough = self.covered.sum(axis=0) >= share * self.totals.sum() * (1 - 1e-12)
        return int(enough.argmax()) if enough.any() else None


def held_out_coverage(chooser: RowChooser, texts: Sequence[SaidText]) -> HeldOutCoverage:
    """Coverage of the texts, each part under the order from the other parts."""
    orders, of_text = crosswise(chooser, texts)
    categories = tuple(sorted({text.category for text in texts}))
    covered = np.zeros((len(categories), chooser.num_rows + 1), dtype=np.int64)
    totals = np.zeros(len(categories), dtype=np.int64)
    never_said = 0
    for number, order in enumerate(orders):
        held = [text for text, fold in zip(texts, of_text, strict=True) if fold == number]
        others = [text for text, fold in zip(texts, of_text, strict=True) if fold != number]
        counts = TokenCounts.of(held, chooser.vocab_size)
        known = TokenCounts.of(others, chooser.vocab_size).pooled > 0
        never_said += int(counts.pooled[~known].sum())
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
    """The order from the texts outside each part, and the part of each text."""
    groups = len({text.group for text in texts})
    if groups < 2:
        what = f"its {len(texts)} prompts belong together, so none of them can be held out"
        raise CalibrationError("--traces", what, fix="record traces of more prompts")
    number = min(NUM_FOLDS, groups)
    of_text = folds_of(texts, number)
    orders = [
        chooser.order([text for text, fold in zip(texts, of_text, strict=True) if fold != part])
        for part in range(number)
    ]
    return orders, of_text
