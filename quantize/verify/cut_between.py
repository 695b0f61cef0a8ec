"""A quantized folder against the whole draft, where the vocabulary was cut in between.

Before quantizing or after it: the cut of the whole draft is built again, and what is quantized must
be that. So no folder in between is needed, and nothing of it is believed.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..drafts import Draft, read_draft
from ..drafts.reduced_vocabulary import MAP, SIZE_KEY
from ..errors import CheckpointError
from ..files.checkpoint import PROVENANCE_FILE, Checkpoint
from ..files.digests import algorithm_of, tensor_digest
from ..files.lineage import cuts_of
from ..files.provenance import CutProvenance, QuantizedProvenance, TensorBytes
from ..files.provenance_file import sealed
from ..files.safetensors_header import TensorInfo
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import StoredTables
from ..stored.table_names import HEAD
from .cut_view import Ids, cut_view, map_faults, token_ids
from .record_faults import Record
from .verify_report import Fault


class Between(NamedTuple):
    """What a quantized folder is held against.

    Attributes:
        draft: the whole draft, or its cut.
        recorded: of the folder, as if it had been quantized of `draft`.
        faults: of the maps, and of what is recorded of the cut.
    """

    draft: Draft
    recorded: Record | None
    faults: tuple[Fault, ...] = ()


def quantized_record(recorded: Record | CutProvenance | None) -> Record | None:
    """Of the folder as it was quantized, whether it was cut afterwards or not."""
    return recorded.quantized_by if isinstance(recorded, CutProvenance) else recorded


@contextmanager
def cut_between(
    draft: Draft, output: Checkpoint, recorded: Record | CutProvenance | None, target: Path | None
) -> Iterator[Between]:
    """What a folder is held against, whether its vocabulary was cut or not.

    Args:
        target: folder of the target, where its head gave the rows.

    Raises:
        CheckpointError: the rows are the target's, and it is not at hand, or the draft has others.
    """
    quantized = quantized_record(recorded)
    if not isinstance(quantized, QuantizedProvenance) or not cuts_of(recorded):
        yield Between(draft=draft, recorded=quantized)
        return
    ids, faults = _ids(draft, output)
    whole = len(ids) != draft.geometry.draft_vocab_size
    if faults or not (whole or isinstance(recorded, CutProvenance)):
        yield Between(draft=draft, recorded=quantized, faults=faults)
        return
    tables = _tables(draft, output, quantized, target)
    with cut_view(StoredDraft.read(draft.checkpoint), ids, tables) as wanted:
        before = draft.checkpoint.tensors
        changed = [tensor for name, tensor in before.items() if wanted.tensors.get(name) != tensor]
        faults = _source_faults(draft.checkpoint, changed, quantized)
        if isinstance(recorded, CutProvenance):
            anew = {t.name for t in changed} | (wanted.tensors.keys() - before.keys())
            faults += _cut_faults(recorded, quantized, anew)
            quantized = _of_cut(recorded, quantized, wanted, anew)
        yield Between(draft=read_draft(wanted), recorded=quantized, faults=faults)


def _ids(draft: Draft, output: Checkpoint) -> tuple[Ids, tuple[Fault, ...]]:
    """The tokens of the folder's rows, and what is wrong in its map."""
    try:
        ids = token_ids(output, StoredDraft.look(output).draft)
    except CheckpointError as exc:
        fault = Fault(where=exc.where, expected="a cut draft that can be read", got=exc.what)
        return np.empty(0, np.int64), (fault,)
    faults = map_faults(ids, draft.geometry.vocab_size)
    stranger = np.setdiff1d(ids, token_ids(draft.checkpoint, draft))
    if len(stranger) and not faults:
        got = f"target id {stranger[0]}, which the source has no row for ({len(stranger)} in all)"
        faults = [Fault(where=MAP, expected="rows of the source", got=got)]
    return ids, tuple(faults)


def _tables(
    draft: Draft, output: Checkpoint, quantized: QuantizedProvenance, target: Path | None
) -> StoredTables | None:
    """Of the target, if its head gave the rows."""
    own = draft.row(HEAD)
    if own is not None and own.tensor.name in quantized.dropped:
        raise CheckpointError(
            output.folder,
            "its head was left to the target when it was quantized, and given back when its"
            " vocabulary was cut",
            fix="give the quantized folder that was cut behind --against",
        )
    if own is not None or "head" not in draft.family.shared_tables:
        return None
    if target is None:
        raise CheckpointError(
            output.folder,
            "the draft behind --against has no head: the rows are its target's",
            fix="add the target's folder (--target M), or give the folder that it was made from",
        )
    return StoredTables.find(target)


def _source_faults(
    whole: Checkpoint, changed: Sequence[TensorInfo], quantized: QuantizedProvenance
) -> tuple[Fault, ...]:
    """The draft is one of those that the folder was made of; the other tensors show it later."""
    made_of = [*(cut.source.digests for cut in quantized.cuts), quantized.source.digests]
    algorithm = algorithm_of(made_of[0])
    found = {tensor.name: tensor_digest(whole, tensor, algorithm) for tensor in changed}
    if any(all(said.get(n) == digest for n, digest in found.items()) for said in made_of):
        return ()
    where = f"{PROVENANCE_FILE}: source.tensor_digests (before the cut)"
    wrong = next(name for name, digest in found.items() if made_of[0].get(name) != digest)
    got = made_of[0].get(wrong)
    return (Fault(where=f"{where}.{wrong}", expected=found[wrong], got=str(got)),)


def _cut_faults(
    recorded: CutProvenance, quantized: QuantizedProvenance, anew: Collection[str]
) -> tuple[Fault, ...]:
    """Seals, and that the cut changed nothing else of the quantized folder."""
    faults = [
        Fault(where=f"{PROVENANCE_FILE}: {key}sha256", expected=seal, got=said or "none")
        for key, seal, said in (
            ("", sealed(recorded).sha256, recorded.sha256),
            ("quantized_by.", sealed(quantized).sha256, quantized.sha256),
        )
        if seal != said
    ]
    modules = {name.removesuffix(".weight") for name in anew}
    for name, digest in quantized.digests.items():
        if name.rpartition(".")[0] in modules or name in anew:
            continue
        if recorded.digests.get(name) != digest:
            where, got = f"{PROVENANCE_FILE}: tensor_digests.{name}", recorded.digests.get(name)
            expected = f"{digest}, as before the cut"
            faults.append(Fault(where=where, expected=expected, got=str(got)))
    return tuple(faults)


def _of_cut(
    recorded: CutProvenance,
    quantized: QuantizedProvenance,
    wanted: Checkpoint,
    anew: Collection[str],
) -> QuantizedProvenance:
    """The record that the folder would have, had the cut draft been quantized."""
    algorithm = algorithm_of(quantized.source.digests)
    digests = {
        name: tensor_digest(wanted, tensor, algorithm)
        if name in anew
        else quantized.source.digests.get(name, "none")
        for name, tensor in wanted.tensors.items()
    }
    changes = {path: value for path, value in quantized.config_changes.items() if path != SIZE_KEY}
    return sealed(
        replace(
            quantized,
            source=replace(quantized.source, tensor_digests=digests, tensor_sha256={}),
            tensor_digests=recorded.digests,
            tensor_sha256={},
            tensor_bytes=TensorBytes(before=wanted.nbytes, after=recorded.tensor_bytes.after),
            config_changes=changes,
        )
    )
