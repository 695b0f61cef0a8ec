"""Which rows of a draft's head stand for which tokens, and which of them a cut keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...recipes.errors import short
from ..drafts import Draft
from ..drafts.reduced_vocabulary import MAP
from ..errors import CheckpointError, PlanError
from ..lints.vocabulary import check_vocabulary_map, vocabulary_map
from ..stored.decoded_numbers import read_integers

_MOST_NAMED = 3
TREE_WIDTH = 10
"""Most likely tokens of a step that engines ask a draft for: EAGLE-2's trees take 10."""
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The rows that a cut keeps.

    Attributes:
        target_ids: that they stand for, ascending, [N].
        rows: of the source, in the order of `target_ids`, [N].
        size_before: rows of the source.
        missing: ids that were asked for, but have no row in the source.
    """

    target_ids: Ids
    rows: Ids
    size_before: int
    missing: int


def check_may_be_cut(draft: Draft) -> None:
    """Refuse a draft of a family whose drafts have the target's whole vocabulary.

    Raises:
        PlanError: they have.
    """
    why = draft.family.whole_vocabulary
    if why is not None:
        raise PlanError(
            draft.checkpoint.folder,
            f"the vocabulary of {draft.family.name} cannot be cut: {why}",
            fix="quantize the head instead (draftquant recipes list), if it has one of its own",
        )


def stored_target_ids(draft: Draft) -> Ids:
    """The target id of every row of the head, in the order of the rows.

    Raises:
        CheckpointError: the map points outside the vocabulary, or twice to one token, or it holds
            target ids where engines read offsets.
    """
    check_vocabulary_map(draft)
    for lint in vocabulary_map(draft):
        raise CheckpointError(draft.checkpoint.folder, lint.cause, fix=lint.remedy)
    row = draft.row(MAP)
    if row is None:
        return np.arange(draft.geometry.draft_vocab_size)
    offsets = read_integers(draft.checkpoint, row.tensor)
    return offsets + np.arange(len(offsets))


def kept_rows(draft: Draft, target_ids: Sequence[int]) -> KeptRows:
    """The rows that stand for these tokens.

    Args:
        draft: to cut, of plain weights or as a quantized folder stands for them.
        target_ids: ascending and distinct; those that the draft has no row for are left out.

    Raises:
        PlanError: they are not, or one is none of the target's, or so few or so many rows are kept
            that the result is no cut draft; or its family has none.
        CheckpointError: see `stored_target_ids`.
    """
    check_may_be_cut(draft)
    vocabulary, where = draft.geometry.vocab_size, draft.checkpoint.folder
    asked = np.asarray(target_ids, np.int64)
    _check_ids(asked, vocabulary, where)
    stored = stored_target_ids(draft)
    order = np.argsort(stored)
    places = np.searchsorted(stored, asked, sorter=order)
    rows = order[np.minimum(places, len(stored) - 1)]
    there = stored[rows] == asked
    kept = KeptRows(
        target_ids=asked[there],
        rows=rows[there],
        size_before=len(stored),
        missing=int(len(asked) - there.sum()),
    )
    _check_size(draft, kept)
    return kept


def _check_ids(asked: Ids, vocabulary: int, where: object) -> None:
    """Distinct, ascending, of the target's vocabulary."""
    outside = asked[(asked < 0) | (asked >= vocabulary)]
    if len(outside):
        raise PlanError(
            where,
            f"target ids: expected ids from 0 to {vocabulary - 1:,}, got {_named(outside)}",
            fix="choose the rows by traces of this draft's target",
        )
    if len(asked) > vocabulary:
        raise PlanError(
            where,
            f"expected at most {vocabulary:,} rows, as many as the target has tokens, got"
            f" {len(asked):,}",
            fix="ask for a smaller size",
        )
    steps = np.diff(asked)
    if (steps <= 0).any():
        repeated = len(asked) - len(np.unique(asked))
        what = f"{repeated} of {len(asked)} stand there twice" if repeated else "not in that order"
        raise PlanError(
            where,
            f"target ids: expected distinct ids in ascending order, but {what}",
            fix="give each id once, sorted",
        )


def _check_size(draft: Draft, kept: KeptRows) -> None:
    """The kept rows are enough to draft with, and fewer than before."""
    where, size = draft.checkpoint.folder, len(kept.rows)
    least = max(TREE_WIDTH, draft.geometry.most_draft_tokens or 0)
    said = f"{size:,} of {kept.size_before:,} rows"
    if kept.missing:
        said += f" ({kept.missing:,} of the asked tokens have none here)"
    if size < least:
        raise PlanError(
            where,
            f"expected at least {least} kept rows, got {said}: engines take the"
            f" {TREE_WIDTH} most likely tokens of a step, or one for each of K draft tokens",
            fix="ask for a larger size, or cut the draft that has the whole vocabulary",
        )
    if size == kept.size_before:
        raise PlanError(
            where,
            f"all of its {size:,} rows would be kept, so there is nothing to cut",
            fix="ask for a smaller size, or use the draft as it is",
        )


def _named(ids: Ids) -> str:
    named = ", ".join(short(int(one)) for one in ids[:_MOST_NAMED])
    return named + (f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else "")
