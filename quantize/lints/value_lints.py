"""Lints on values: the table from draft ids to target ids, and halves of concat inputs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...recipes.errors import CheckpointError
from ..drafts import Draft
from ..drafts.family import Lint, Row, told
from ..drafts.shared.eagle3 import eagle3
from ..files.provenance_file import cuts_of, read_provenance
from ..stored.decoded_numbers import floats, read_rows
from .vocabulary_map import VocabularyMap


def check_vocabulary_map(draft: Draft) -> None:
    """Refuse a table with which an engine would index out of range, or propose nonsense."""
    table, vocab = _vocabulary_map(draft), draft.geometry.vocab_size
    outside = table.outside(vocab) if table else []
    if not table or not outside:
        return
    i, offsets = outside[0], table.offsets
    is_list = table.is_absolute and offsets[0] >= 0 and offsets[-1] < vocab
    lint = told("d2t-absolute") if is_list else None
    raise CheckpointError(
        draft.checkpoint.folder,
        f"d2t[{i}] = {offsets[i]} makes draft id {i} target id {i + int(offsets[i])}, outside the"
        f" vocabulary of {vocab} ({len(outside)} of {len(offsets)} such ids)"
        + (f": {lint.cause}" if lint else ""),
        fix=lint.remedy if lint else "export the draft again, with the d2t of its lm_head",
    )


def vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """A table in range that still cannot be right."""
    table = _vocabulary_map(draft)
    if table is None:
        return
    count, marked = len(table.offsets), table.marked
    if table.is_absolute:
        yield told("d2t-absolute")
    elif table.repeated:
        yield told("d2t-duplicates", doubled=table.repeated, count=count)
    elif marked is not None and not table.agrees:
        unmarked = len(np.setdiff1d(table.ids, marked))
        yield told("d2t-against-t2d", marked=len(marked), count=count, unmarked=unmarked)


def _vocabulary_map(draft: Draft) -> VocabularyMap | None:
    rows = {name: row for name in ("d2t", "t2d") if (row := draft.row(name)) is not None}
    return VocabularyMap.read(draft.checkpoint, {name: row.tensor for name, row in rows.items()})


def pruned_head(draft: Draft) -> Iterator[Lint]:
    """Source: TorchSpec @6f21829 `convert_to_hf.py`, `preprocessing.py` (offsets as row ids)."""
    geometry = draft.geometry
    if not draft.is_torchspec or geometry.draft_vocab_size == geometry.vocab_size:
        return
    cuts = cuts_of(read_provenance(draft.checkpoint.folder))
    if not cuts or cuts[0].size_before < geometry.vocab_size:  # otherwise its export was whole
        yield told("pruned-head")


def draft_vocab_size(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `llama_eagle3.py`, `kimi_k25_eagle3.py`, `eagle_worker_v2.py`."""
    geometry, config = eagle3(draft), draft.checkpoint.config
    if geometry is None or draft.in_speculators_layout or config.get("tie_word_embeddings"):
        return
    size, headed = geometry.draft_vocab_size, draft.row("lm_head.weight") is not None
    declared = config.get("draft_vocab_size") is not None
    refused = "draft_vocab_size" not in config and not draft.is_mla
    taken = "replaces its lm_head by the target's" if headed else "leaves the head uninitialized"
    what = "does not load the draft" if refused else taken
    if headed and not declared:
        yield told("draft-vocab-size-missing", {"draft_vocab_size": size}, what=what, size=size)
    elif not headed and (declared or refused) and size == geometry.vocab_size:
        yield told("lm-head-missing", {"draft_vocab_size": None}, what=what)
    elif not headed and (declared or refused):
        yield told("lm-head-missing-of-some", what=what)


# ---- The concat input of EAGLE-3: how far apart the halves of its first linears are
# With one scale per row, a half of [norm(embedding); norm(hidden)] whose weights are much smaller
# than the other's is rounded to zero, and acceptance collapses.

_SAMPLED_ROWS = 256
HARMFUL_RATIO = 4.0
"""From here on INT4 per channel visibly loses the smaller half (at 10, 99 % of it becomes zero)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRatio:
    """Mean row absmax of the hidden half over the embedding half's, in evenly spread rows."""

    name: str
    ratio: float
    num_rows: int

    @property
    def harmful(self) -> bool:
        """True if one scale per row costs the smaller half most of its INT4 codes."""
        return max(self.ratio, 1 / self.ratio) >= HARMFUL_RATIO if self.ratio > 0 else True


def half_ratios(draft: Draft) -> tuple[HalfRatio, ...]:
    """Measure every linear that reads the concat input."""
    return tuple(_ratio(draft, row) for row in draft.concat_linears())


def balance_exponent(ratios: Sequence[float]) -> int:
    """The k that brings the halves of linears after one norm closest together; 0 = no change.

    Among ratios of magnitudes, hidden half over embedding half, 0 and infinity are ignored.
    """
    logs = [math.log2(ratio) for ratio in ratios if 0 < ratio < math.inf]
    if not logs or max(map(abs, logs)) < math.log2(HARMFUL_RATIO):
        return 0
    return round((min(logs) + max(logs)) / 2)


def _ratio(draft: Draft, row: Row) -> HalfRatio:
    rows, columns = row.tensor.shape
    sampled = np.unique(np.linspace(0, rows - 1, min(rows, _SAMPLED_ROWS)).astype(np.int64))
    blocks = (read_rows(draft.checkpoint, row.tensor, i, i + 1) for i in sampled.tolist())
    sizes = np.abs(np.stack([floats(block, row.tensor.dtype) for block in blocks]))
    halves = sizes[:, : columns // 2].max(axis=1), sizes[:, columns // 2 :].max(axis=1)
    embedding, hidden = (float(half.mean()) for half in halves)
    ratio = hidden / embedding if embedding > 0 else float("inf")
    return HalfRatio(name=row.tensor.name, ratio=ratio, num_rows=len(sampled))
