"""The draft's vocabulary: its size, its head, and the table from draft ids to target ids.

Draft id i stands for target id i + d2t[i] (SpecForge, ModelOpt, vLLM 0.33 `llama_eagle3.py`, SGLang
0.5.23 `llama_eagle3.py`); t2d marks the target ids that some draft id stands for.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...recipes.errors import CheckpointError
from ..drafts import Draft
from ..drafts.family import Lint
from ..drafts.shared.eagle3 import eagle3
from ..files.provenance_file import cuts_of, read_provenance
from ..stored.decoded_numbers import read_integers, read_whole

_ABSOLUTE = "d2t holds target ids, but engines expect offsets (target id - draft id)"
_SUBTRACT = "subtract arange(draft_vocab_size) from d2t"


def check_vocabulary_map(draft: Draft) -> None:
    """Every draft id stands for an id of the target's vocabulary.

    Raises:
        CheckpointError: it does not; an engine would index out of range, or propose nonsense.
    """
    offsets = _offsets(draft)
    if offsets is None:
        return
    vocab, ids = draft.geometry.vocab_size, np.arange(len(offsets))
    outside = np.flatnonzero((offsets < -ids) | (offsets >= vocab - ids))
    if len(outside) == 0:
        return
    i = int(outside[0])
    absolute = _ascending(offsets) and offsets[0] >= 0 and offsets[-1] < vocab
    raise CheckpointError(
        draft.checkpoint.folder,
        f"d2t[{i}] = {offsets[i]} makes draft id {i} target id {i + int(offsets[i])}, outside the"
        f" vocabulary of {vocab} ({len(outside)} of {len(offsets)} such ids)"
        + (f": {_ABSOLUTE}" if absolute else ""),
        fix=_SUBTRACT if absolute else "export the draft again, with the d2t of its lm_head",
    )


def tied_head(draft: Draft) -> Iterator[Lint]:
    """Source: SGLang 0.5.23 `llama_eagle3.py:303`, executed; vLLM 0.33 does not read the key."""
    tied = draft.checkpoint.config.get("tie_word_embeddings") is True
    if eagle3(draft) is not None and tied and draft.row("lm_head.weight") is not None:
        yield Lint(
            name="head-tied",
            level="warning",
            cause="tie_word_embeddings is true, but the draft has a head of its own: SGLang"
            " 0.5.23 drops this head and uses the embedding instead",
            remedy="write tie_word_embeddings: false",
            fix={"tie_word_embeddings": False},
        )


def vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """A table in range that still cannot be the right one."""
    offsets = _offsets(draft)
    if offsets is None:
        return
    ids = offsets + np.arange(len(offsets))
    kept = _kept_ids(draft)
    agrees = kept is not None and np.array_equal(np.unique(ids), kept)
    if kept is None:  # without t2d: no two neighbours among thousands of kept ids is not credible
        absolute = len(offsets) > 1 and _ascending(offsets)
    else:
        absolute = not agrees and np.array_equal(offsets, kept)
    if absolute:
        yield Lint(name="d2t-absolute", level="warning", cause=_ABSOLUTE, remedy=_SUBTRACT)
    elif len(np.unique(ids)) < len(ids):
        yield Lint(
            name="d2t-duplicates",
            level="warning",
            cause=f"{len(ids) - len(np.unique(ids))} of {len(ids)} draft ids map to a target"
            " id that another draft id also maps to",
            remedy="export d2t again: the rows of lm_head and their target ids do not match",
        )
    elif kept is not None and not agrees:
        yield Lint(
            name="d2t-against-t2d",
            level="warning",
            cause=f"t2d and d2t contradict each other: t2d marks {len(kept)} target ids, d2t"
            f" reaches {len(ids)}, and {len(np.setdiff1d(ids, kept))} of these are not"
            " marked. Engines read d2t, trainers read t2d",
            remedy="export both tables again from the same vocabulary",
        )


def full_vocabulary_map(draft: Draft) -> Iterator[Lint]:
    """Source: loaded in vLLM 0.33: "no module or parameter named 'draft_id_to_target_id'"."""
    if (
        draft.row("d2t") is not None
        and draft.geometry.draft_vocab_size == draft.geometry.vocab_size
    ):
        yield Lint(
            name="d2t-of-full-vocabulary",
            level="warning",
            cause="d2t is stored although the draft has the target's whole vocabulary"
            " (SpecForge always writes it): vLLM 0.33 then refuses to load the draft",
            remedy="remove d2t and t2d from the source; SGLang does not need them either",
        )


def pruned_head(draft: Draft) -> Iterator[Lint]:
    """Source: TorchSpec @6f21829 `convert_to_hf.py`, `preprocessing.py` (offsets as row ids)."""
    geometry = draft.geometry
    if not draft.is_torchspec or geometry.draft_vocab_size == geometry.vocab_size:
        return
    cuts = cuts_of(read_provenance(draft.checkpoint.folder))
    if not cuts or cuts[0].size_before < geometry.vocab_size:  # else its export was whole
        yield Lint(
            name="pruned-head",
            level="warning",
            cause="TorchSpec's export of a pruned vocabulary takes rows d2t[i] of lm_head"
            " instead of rows i + d2t[i]",
            remedy="prune lm_head again from the training checkpoint, at rows i + d2t[i];"
            " replay shows whether it is needed, because with wrong rows hardly a token"
            " is accepted",
        )


def draft_vocab_size(draft: Draft) -> Iterator[Lint]:
    """The key decides in SGLang whether the draft keeps its own head.

    Source: SGLang 0.5.23 `llama_eagle3.py` (loaded), `kimi_k25_eagle3.py`, `eagle_worker_v2.py`.
    """
    geometry, config = eagle3(draft), draft.checkpoint.config
    if geometry is None or draft.in_speculators_layout or config.get("tie_word_embeddings"):
        return
    size = geometry.draft_vocab_size
    declared = config.get("draft_vocab_size") is not None
    refused = "draft_vocab_size" not in config and not draft.is_mla
    if draft.row("lm_head.weight") is not None:
        if not declared:
            what = "does not load the draft" if refused else "replaces its lm_head by the target's"
            yield Lint(
                name="draft-vocab-size-missing",
                level="warning",
                cause=f"config.json has no draft_vocab_size: SGLang 0.5.23 then {what}",
                remedy=f"add draft_vocab_size {size}",
                fix={"draft_vocab_size": size},
            )
    elif declared or refused:
        full = size == geometry.vocab_size
        yield Lint(
            name="lm-head-missing",
            level="warning",
            cause="the draft stores no lm_head, but draft_vocab_size is not null: SGLang"
            " 0.5.23 then"
            + (" does not load the draft" if refused else " leaves the head uninitialized"),
            remedy="write draft_vocab_size null, which makes SGLang take the target's head"
            if full
            else "store the rows of lm_head: no engine takes some of the target's",
            fix={"draft_vocab_size": None} if full else {},
        )


def _offsets(draft: Draft) -> NDArray[np.int64] | None:
    """d2t as stored, [draft vocabulary]; None without one."""
    row = draft.row("d2t")
    return None if row is None else read_integers(draft.checkpoint, row.tensor)


def _kept_ids(draft: Draft) -> NDArray[np.int64] | None:
    """The target ids that t2d marks, ascending; None without one."""
    row = draft.row("t2d")
    return np.flatnonzero(read_whole(draft.checkpoint, row.tensor)) if row is not None else None


def _ascending(values: NDArray[np.int64]) -> bool:
    return bool((np.diff(values) > 0).all())
