"""The token map of SGLang: which tokens an EAGLE-1 draft proposes, whose head is the target's.

`--speculative-token-map FILE` names a file of torch.save. SGLang 0.5.23 takes the rows of the
target's head that it lists, and looks each proposed row up in it (`eagle_worker_v2.py:372`,
`spec_utils.py:792`). With EAGLE-3 it ignores the file with a warning, because such a draft has d2t.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ..errors import CheckpointError, OutputError
from ..files.staging import staged_file
from ..files.torch_file import TorchFileProblem, load_plain


def write_token_map(out: Path, target_ids: Sequence[int], *, vocab_size: int) -> None:
    """Write the file: [draft vocabulary] int64, the target's ids themselves.

    Args:
        out: file to create; the engine asks for no ending, and `.pt` is usual.
        target_ids: ascending and distinct.
        vocab_size: rows of the target's head.

    Raises:
        OutputError: `out` exists or cannot be written.
        CheckpointError: the ids are not such ids, and SGLang would read past the head.
    """
    _check(out, target_ids, vocab_size)
    ids = torch.tensor(target_ids, dtype=torch.int64)
    with staged_file(out) as staging:
        with staging.open("xb") as stream:  # a stream: the file does not hold its own name
            torch.save(ids, stream)
        if read_token_map(staging, vocab_size=vocab_size) != tuple(target_ids):
            raise OutputError(
                out,
                "reads back as other ids than were written",
                fix="check the disk, and write it again; nothing was kept",
            )


def read_token_map(path: Path, *, vocab_size: int) -> tuple[int, ...]:
    """The target ids that a file lists, as SGLang reads it: a tensor, or a list of integers.

    Raises:
        CheckpointError: it is no such file, or names no distinct, ascending ids of this vocabulary.
    """
    try:
        loaded = load_plain(path)
    except TorchFileProblem as exc:
        raise CheckpointError(
            path, f"expected a token map, got a file that is not one: {exc}", fix=_FIX
        ) from exc
    if isinstance(loaded, torch.Tensor) and loaded.dim() == 1 and not loaded.is_floating_point():
        loaded = loaded.tolist()
    if not isinstance(loaded, list) or not all(type(i) is int for i in loaded):
        raise CheckpointError(path, "expected one list of target ids", fix=_FIX)
    _check(path, loaded, vocab_size)
    return tuple(loaded)


_FIX = "write it with draftquant vocab DRAFT --traces T --size N --token-map FILE.pt"


def _check(path: Path, ids: Sequence[int], vocab_size: int) -> None:
    """Ascending ids of the vocabulary, each once, and not none."""
    if not ids:
        raise CheckpointError(path, "the token map names no token", fix=_FIX)
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise CheckpointError(
            path, f"target id {outside} lies outside the vocabulary of {vocab_size}", fix=_FIX
        )
    for before, after in pairwise(ids):
        if after <= before:
            raise CheckpointError(
                path, f"expected ascending, distinct ids, got {after} after {before}", fix=_FIX
            )
