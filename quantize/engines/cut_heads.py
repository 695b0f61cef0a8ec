"""A head with rows for fewer tokens than the vocabulary: what reaches the proposals of an engine.

Loading and proposing were executed (`tests/engines/RESULTS.md`). Draft id i stands for target id
i + d2t[i]; no engine reads t2d.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..drafts.engine_traits import Finding
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from .contract import CutHead, Question, Verdict
from .engine import Engine

_WEIGHTS = ("weight", "weight_packed")
_EXPORT = "export d2t again: the rows of lm_head and their target ids do not match"
_SUBTRACT = "subtract arange(draft_vocab_size) from d2t"

Stored = Mapping[str, Mapping[str, TensorInfo]]
"""Canonical module -> suffix -> tensor."""


def cut_head_findings(
    engine: Engine, question: Question, checkpoint: Checkpoint, geometry: Any, stored: Stored
) -> Iterator[Finding]:
    """A head without its map, a map without its head, a map that names wrong tokens."""
    tables = stored.get("", {})
    head = CutHead(
        vocabulary=geometry.vocab_size,
        built=geometry.draft_vocab_size,
        is_declared=question.config.get("draft_vocab_size") is not None,
        stored=_rows(stored.get("lm_head", {}), _WEIGHTS),
        mapped=_rows(tables, ("d2t",)),
    )
    if not question.traits.prunes_vocabulary or question.own.shares_tables:
        return
    yield from engine.tensors.cut_head(question, head)
    if not head.is_cut:
        return
    if head.mapped is None:
        yield Finding(
            "wrong",
            f"The head has {head.built} tokens and no map d2t is stored: {engine.title} takes the"
            " tokens that the draft proposes for other tokens of the target",
            "export the draft with d2t",
        )
    else:
        yield from _wrong_tokens(engine, checkpoint, head, tables)


def head_notes(
    engine: Engine, question: Question, geometry: Any, verdict: Verdict
) -> Iterator[str]:
    """That a served head is cut."""
    rows, vocab = geometry.draft_vocab_size, geometry.vocab_size
    if verdict == "LOADS" and question.traits.prunes_vocabulary and rows < vocab:
        yield (
            f"the head has rows for {rows:,} of {vocab:,} tokens, and {engine.title} proposes"
            " these alone, by d2t"
        )


def _wrong_tokens(
    engine: Engine, checkpoint: Checkpoint, head: CutHead, tables: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """The numbers in d2t: offsets, each row another token; nothing of a map that no file holds."""
    import numpy as np  # for this question alone

    from ..stored.decoded_numbers import INTEGERS, read_integers, read_whole

    if not tables["d2t"].file or tables["d2t"].dtype not in INTEGERS:
        return
    offsets = read_integers(checkpoint, tables["d2t"])
    ids = offsets + np.arange(len(offsets))
    marked = np.flatnonzero(read_whole(checkpoint, tables["t2d"])) if "t2d" in tables else ids
    absolute = np.array_equal(offsets, marked) and not np.array_equal(ids, marked)
    outside = np.flatnonzero((ids < 0) | (ids >= head.vocabulary))
    repeated = len(ids) - len(np.unique(ids))
    if absolute:
        text = (
            f"d2t holds target ids, and {engine.title} adds the number of the row to each: the"
            " draft proposes other tokens, or fails at the first request"
        )
        yield Finding("wrong", text, _SUBTRACT)
    elif len(outside):
        row = int(outside[0])
        text = (
            f"d2t makes row {row} of the head stand for target id {ids[row]}, outside the"
            f" vocabulary of {head.vocabulary}: {engine.title} loads the draft, which proposes"
            " tokens that do not exist, or fails at the first request"
        )
        yield Finding("wrong", text, _EXPORT)
    elif repeated:
        text = (
            f"{repeated} of {len(ids)} rows of d2t stand for a token for which another row stands:"
            f" {engine.title} loads the draft, which never proposes the tokens that these rows"
            " were trained for"
        )
        yield Finding("wrong", text, _EXPORT)


def _rows(tensors: Mapping[str, TensorInfo], suffixes: tuple[str, ...]) -> int | None:
    """Of the first of the tensors that is stored."""
    found = (tensors[suffix].shape for suffix in suffixes if suffix in tensors)
    return next((shape[0] for shape in found if shape), None)
