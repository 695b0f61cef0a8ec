"""Lints on values: the table from draft ids to target ids, and halves of concat inputs.

Draft id i stands for target id i + d2t[i] (SpecForge, ModelOpt, vLLM 0.33 `llama_eagle3.py`, SGLang
0.5.23 `llama_eagle3.py`); t2d marks the target ids that some draft id stands for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...recipes.errors import CheckpointError
from ..drafts import Draft
from ..drafts.family import Lint, Row, told
from ..drafts.shared.eagle3 import eagle3
from ..files.provenance_file import cuts_of, read_provenance
from ..stored.decoded_numbers import floats, read_integers, read_rows, read_whole


def check_vocabulary_map(draft: Draft) -> None:
    """Refuse a table with which an engine would index out of range, or propose nonsense."""
    offsets = _offsets(draft)
    if offsets is None:
        return
    vocab, ids = draft.geometry.vocab_size, np.arange(len(offsets))
    outside = np.flatnonzero((offsets < -ids) | (offsets >= vocab - ids))
    if len(outside) == 0:
        return
    i = int(outside[0])
    absolute = _ascending(offsets) and offsets[0] >= 0 and offsets[-1] < vocab
    lint = told("d2t-absolute")
    raise CheckpointError(
        draft.checkpoint.folder,
        f"d2t[{i}] = {offsets[i]} makes draft id {i} target id {i + int(offsets[i])}, outside the"
        f" vocabulary of {vocab} ({len(outside)} of {len(offsets)} such ids)"
        + (f": {lint.cause}" if absolute else ""),
        fix=lint.remedy if absolute else "export the draft again, with the d2t of its lm_head",
    )


def vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """A table in range that still cannot be right."""
    offsets = _offsets(draft)
    if offsets is None:
        return
    ids = offsets + np.arange(len(offsets))
    marks = draft.row("t2d")  # of target ids
    kept = np.flatnonzero(read_whole(draft.checkpoint, marks.tensor)) if marks is not None else None
    agrees = kept is not None and np.array_equal(np.unique(ids), kept)
    if kept is None:  # without t2d: no two neighbours among thousands of kept ids is implausible
        absolute = len(offsets) > 1 and _ascending(offsets)
    else:
        absolute = not agrees and np.array_equal(offsets, kept)
    if absolute:
        yield told("d2t-absolute")
    elif len(np.unique(ids)) < len(ids):
        yield told("d2t-duplicates", doubled=len(ids) - len(np.unique(ids)), count=len(ids))
    elif kept is not None and not agrees:
        unmarked = len(np.setdiff1d(ids, kept))
        yield told("d2t-against-t2d", marked=len(kept), count=len(ids), unmarked=unmarked)


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


def _offsets(draft: Draft) -> NDArray[np.int64] | None:
    row = draft.row("d2t")
    return None if row is None else read_integers(draft.checkpoint, row.tensor)


def _ascending(values: NDArray[np.int64]) -> bool:
    return bool((np.diff(values) > 0).all())


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
