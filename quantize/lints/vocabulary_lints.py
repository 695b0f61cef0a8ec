"""The draft's vocabulary: its size, its head, and the table from draft ids to target ids.

Draft id i stands for target id i + d2t[i] (SpecForge, ModelOpt, vLLM 0.33 `llama_eagle3.py`, SGLang
0.5.23 `llama_eagle3.py`); t2d marks the target ids that some draft id stands for.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...recipes.errors import CheckpointError
from ..drafts import Draft
from ..drafts.family import Lint, told
from ..drafts.shared.eagle3 import eagle3
from ..files.provenance_file import cuts_of, read_provenance
from ..stored.decoded_numbers import read_integers, read_whole


def check_vocabulary_map(draft: Draft) -> None:
    """Refuse a table by which an engine would index out of range, or propose nonsense."""
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


def tied_head(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `llama_eagle3.py:303`, executed; vLLM 0.33 does not read the key."""
    tied = draft.checkpoint.config.get("tie_word_embeddings") is True
    if eagle3(draft) is not None and tied and draft.row("lm_head.weight") is not None:
        yield told("head-tied", {"tie_word_embeddings": False})


def vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """A table in range that still cannot be the right one."""
    offsets = _offsets(draft)
    if offsets is None:
        return
    ids = offsets + np.arange(len(offsets))
    marks = draft.row("t2d")  # of target ids
    kept = np.flatnonzero(read_whole(draft.checkpoint, marks.tensor)) if marks is not None else None
    agrees = kept is not None and np.array_equal(np.unique(ids), kept)
    if kept is None:  # without t2d: no two neighbours among thousands of kept ids is not credible
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


def full_vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """Source: loaded in vLLM 0.33: "no module or parameter named 'draft_id_to_target_id'"."""
    geometry = draft.geometry
    if draft.row("d2t") is not None and geometry.draft_vocab_size == geometry.vocab_size:
        yield told("d2t-of-full-vocabulary")


def pruned_head(draft: Draft) -> Iterator[Lint]:
    """Source: TorchSpec @6f21829 `convert_to_hf.py`, `preprocessing.py` (offsets as row ids)."""
    geometry = draft.geometry
    if not draft.is_torchspec or geometry.draft_vocab_size == geometry.vocab_size:
        return
    cuts = cuts_of(read_provenance(draft.checkpoint.folder))
    if not cuts or cuts[0].size_before < geometry.vocab_size:  # else its export was whole
        yield told("pruned-head")


def draft_vocab_size(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `llama_eagle3.py`, `kimi_k25_eagle3.py`, `eagle_worker_v2.py`."""
    geometry, config = eagle3(draft), draft.checkpoint.config
    if geometry is None or draft.in_speculators_layout or config.get("tie_word_embeddings"):
        return
    size = geometry.draft_vocab_size
    declared = config.get("draft_vocab_size") is not None
    refused = "draft_vocab_size" not in config and not draft.is_mla
    if draft.row("lm_head.weight") is not None:
        if not declared:
            what = "does not load the draft" if refused else "replaces its lm_head by the target's"
            yield told("draft-vocab-size-missing", {"draft_vocab_size": size}, what=what, size=size)
    elif declared or refused:
        what = "does not load the draft" if refused else "leaves the head uninitialized"
        if size == geometry.vocab_size:
            yield told("lm-head-missing", {"draft_vocab_size": None}, what=what)
        else:
            yield told("lm-head-missing-of-some", what=what)


def _offsets(draft: Draft) -> NDArray[np.int64] | None:
    row = draft.row("d2t")
    return None if row is None else read_integers(draft.checkpoint, row.tensor)


def _ascending(values: NDArray[np.int64]) -> bool:
    return bool((np.diff(values) > 0).all())
