"""A draft as a cut of its vocabulary must have made it: built of the source's rows once more.

Rows, maps and config are made here by other means than those that wrote the folder, in a scratch
file that is read as every checkpoint. So a folder that was quantized before or after the cut is
held against the whole draft, without a folder in between.
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts import Draft, Row, read_config, read_draft
from ..drafts.geometry import MAP, MASK, SIZE_KEY
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import algorithm_of, tensor_digest
from ..files.provenance import CutProvenance, QuantizedProvenance, TensorBytes
from ..files.provenance_file import cuts_of, sealed
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from ..stored.decoded_numbers import INTEGERS, Bytes, read_integers, read_rows, read_whole
from ..stored.stored_declaration import ZERO_POINTS, stored_parts
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import HEAD, StoredTables
from .comparison import Fault
from .demands import Record, recorded

Ids = npt.NDArray[np.int64]
_BLOCK_ROWS = 4096
_AGAINST = "give the draft that was cut behind --against"


def token_ids(checkpoint: Checkpoint, draft: Draft) -> Ids:
    """The target id of every row of a head; VerifyError of families that have no cut one."""
    why = draft.family.whole_vocabulary
    if why is not None:
        what = f"a {draft.family.name} draft has no cut vocabulary: {why}"
        raise VerifyError(draft.checkpoint.folder, what, fix=_AGAINST)
    row = draft.row(MAP)
    if row is None:
        return np.arange(draft.geometry.draft_vocab_size, dtype=np.int64)
    offsets = read_integers(checkpoint, row.tensor)
    return offsets + np.arange(len(offsets))


def map_faults(ids: Ids, source: Draft) -> list[Fault]:
    """A cut's map goes up, from token to token of the target, each of which the source has."""
    vocabulary = source.geometry.vocab_size
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        i = int(outside[0])
        return [Fault(MAP, f"target ids from 0 to {vocabulary - 1}", f"{ids[i]} of draft id {i}")]
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if len(falling):
        i = int(falling[0]) + 1
        got = f"target id {ids[i]} of draft id {i} behind {ids[i - 1]}"
        return [Fault(MAP, "distinct target ids in ascending order", got)]
    return []


def stranger_faults(ids: Ids, checkpoint: Checkpoint, source: Draft) -> list[Fault]:
    """The source has a row for each token."""
    stranger = np.setdiff1d(ids, token_ids(checkpoint, source))
    if not len(stranger):
        return []
    got = f"target id {stranger[0]}, which the source has no row for ({len(stranger)} in all)"
    return [Fault(MAP, "rows of the source", got)]


@contextmanager
def cut_view(
    source: StoredDraft, ids: Ids, tables: StoredTables | None = None
) -> Iterator[Checkpoint]:
    """What a folder becomes whose vocabulary is cut to these ascending target ids.

    Where it has no head, it gets rows of the target's `tables`; without them there is none.

    Raises:
        VerifyError: its family has no cut vocabulary, or its config none of this size.
    """
    draft = source.draft
    config = {**source.checkpoint.config, SIZE_KEY: len(ids)}
    rows, resized = _rows_of(source, ids), _resized(draft, config)
    with tempfile.TemporaryDirectory(prefix="draftquant-verify-") as folder:
        path = Path(folder) / "rows"
        with path.open("wb") as stream:
            scratch = _Scratch(path, stream)
            tensors = dict(source.checkpoint.tensors)
            for row in draft.rows:
                if row.canonical not in resized:
                    continue
                stored = source.parts(row) if source.is_quantized(row) else {"": row.tensor}
                for tensor in stored.values():
                    data, shape = _cut(source, row, tensor, rows)
                    tensors[tensor.name] = scratch.add(tensor.name, tensor.dtype, shape, data)
            for tensor in _maps(draft, ids, scratch):
                tensors[tensor.name] = tensor
            if tables is not None:
                head = tables.lm_head
                data = _gathered(tables.checkpoint, head, ids)
                shape = (len(ids), *head.shape[1:])
                tensors[HEAD] = scratch.add(HEAD, head.dtype, shape, data)
        yield replace(source.checkpoint, config=config, tensors=dict(sorted(tensors.items())))


class _Scratch:
    """Tensors, one behind the other, in a file of their own."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream, self._end = path, stream, 0

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], blocks: Iterator[Bytes]
    ) -> TensorInfo:
        """Write one; an absolute path stands for its file."""
        start = self._end
        for block in blocks:
            self._stream.write(block.data)
            self._end += block.nbytes
        return TensorInfo(
            name=name, dtype=dtype, shape=shape, file=str(self._path), start=start, stop=self._end
        )


def _rows_of(source: StoredDraft, ids: Ids) -> Ids:
    places = {int(token): i for i, token in enumerate(token_ids(source.checkpoint, source.draft))}
    absent = [int(token) for token in ids if int(token) not in places]
    if absent:
        raise VerifyError(
            source.checkpoint.folder,
            f"has no row for token {absent[0]}, nor for {len(absent) - 1:,} others of the cut"
            " draft",
            fix=_AGAINST,
        )
    return np.array([places[int(token)] for token in ids], np.int64)


def _resized(draft: Draft, config: Mapping[str, Any]) -> frozenset[str]:
    """Canonical names of what has another number of rows under this config."""
    try:
        _, geometry = read_config(replace(draft.checkpoint, config=config))
    except CheckpointError as exc:
        where = draft.checkpoint.folder / CONFIG_FILE
        what = f"cannot be that of a draft with a cut vocabulary: {exc.what}"
        raise VerifyError(where, what, fix=_AGAINST) from exc
    before, after = (
        {name: spec.shape for name, spec in draft.family.tensor_specs(g).items()}
        for g in (draft.geometry, geometry)
    )
    return frozenset(
        name for name in before.keys() & after.keys() if before[name][:1] != after[name][:1]
    )


def _cut(
    source: StoredDraft, row: Row, tensor: TensorInfo, rows: Ids
) -> tuple[Iterator[Bytes], tuple[int, ...]]:
    shape, suffix = (len(rows), *tensor.shape[1:]), tensor.name.rpartition(".")[2]
    scheme = source.scheme_of(row)
    if scheme is None:
        return _gathered(source.checkpoint, tensor, rows), shape
    whole, columns = row.tensor.shape
    part = stored_parts(scheme, len(rows), columns)[suffix]
    if suffix == "weight_shape":
        data = np.array([len(rows), columns]).astype(INTEGERS[tensor.dtype])
        return iter([data.view(np.uint8)]), part.shape
    if suffix in ZERO_POINTS:
        count = int(np.prod(part.shape)) * DTYPE_BYTES[tensor.dtype]
        return iter([np.full(count, ZERO_POINTS[suffix], np.uint8)]), part.shape
    if part.shape == tensor.shape:  # of the inputs
        return iter([read_whole(source.checkpoint, tensor)]), tensor.shape
    if scheme.transposed or tensor.shape[0] != whole or part.shape != shape:
        raise VerifyError(
            f"{source.checkpoint.folder}: {row.module}",
            f"{scheme} is not stored row by row, so no rows of it can be compared",
            fix="cut the BF16 draft, then quantize it, and verify that folder",
        )
    return _gathered(source.checkpoint, tensor, rows), shape


def _gathered(checkpoint: Checkpoint, tensor: TensorInfo, rows: Ids) -> Iterator[Bytes]:
    """Rows in the order that is asked for: of each stretch of the tensor those that lie in it."""
    width = tensor.nbytes // tensor.shape[0]
    first = 0
    while first < len(rows):
        low = int(rows[first])
        near = (rows[first:] >= low) & (rows[first:] < low + _BLOCK_ROWS)
        count = len(near) if near.all() else int(near.argmin())
        places = rows[first : first + count]
        stop = int(places.max()) + 1
        block = read_rows(checkpoint, tensor, low, stop).reshape(stop - low, width)
        yield block[places - low].reshape(-1)
        first += count


def _maps(draft: Draft, ids: Ids, scratch: _Scratch) -> Iterator[TensorInfo]:
    row = draft.row(MAP)
    name = row.tensor.name if row is not None else MAP
    stored = (ids - np.arange(len(ids))).astype(np.dtype("<i8"))
    yield scratch.add(name, "I64", stored.shape, iter([stored.view(np.uint8)]))
    row = draft.row(MASK)
    name = row.tensor.name if row is not None else MASK
    mask = np.isin(np.arange(draft.geometry.vocab_size), ids)
    yield scratch.add(name, "BOOL", mask.shape, iter([mask.view(np.uint8)]))


class Between(NamedTuple):
    """What a quantized folder is held against: the whole draft, or its cut.

    `recorded` is of the folder, as if it had been quantized of `draft`.
    """

    draft: Draft
    recorded: Record | None
    faults: tuple[Fault, ...] = ()


def quantized_record(record: Record | CutProvenance | None) -> Record | None:
    """Of the folder as it was quantized, whether it was cut afterwards or not."""
    return record.quantized_by if isinstance(record, CutProvenance) else record


@contextmanager
def cut_between(
    draft: Draft, output: Checkpoint, record: Record | CutProvenance | None, target: Path | None
) -> Iterator[Between]:
    """What a folder with this record is held against, whether its vocabulary was cut or not.

    Raises:
        CheckpointError: the rows are the target's, and it is not at hand, or the draft has others.
    """
    quantized = quantized_record(record)
    if not isinstance(quantized, QuantizedProvenance) or not cuts_of(record):
        yield Between(draft=draft, recorded=quantized)
        return
    ids, faults = _ids(draft, output)
    whole = len(ids) != draft.geometry.draft_vocab_size
    if faults or not (whole or isinstance(record, CutProvenance)):
        yield Between(draft=draft, recorded=quantized, faults=tuple(faults))
        return
    tables = _tables(draft, output, quantized, target)
    with cut_view(StoredDraft.read(draft.checkpoint), ids, tables) as wanted:
        before = draft.checkpoint.tensors
        changed = [tensor for name, tensor in before.items() if wanted.tensors.get(name) != tensor]
        faults = _source_faults(draft.checkpoint, changed, quantized)
        if isinstance(record, CutProvenance):
            anew = {t.name for t in changed} | (wanted.tensors.keys() - before.keys())
            faults += _cut_faults(record, quantized, anew)
            quantized = _of_cut(record, quantized, wanted, anew)
        yield Between(draft=read_draft(wanted), recorded=quantized, faults=tuple(faults))


def _ids(draft: Draft, output: Checkpoint) -> tuple[Ids, list[Fault]]:
    try:
        ids = token_ids(output, StoredDraft.look(output).draft)
    except CheckpointError as exc:
        fault = Fault(exc.where, "a cut draft that can be read", exc.what)
        return np.empty(0, np.int64), [fault]
    return ids, map_faults(ids, draft) or stranger_faults(ids, draft.checkpoint, draft)


def _tables(
    draft: Draft, output: Checkpoint, quantized: QuantizedProvenance, target: Path | None
) -> StoredTables | None:
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
) -> list[Fault]:
    """The draft is one of those that the folder was made of; the other tensors show it later."""
    made_of = [*(cut.source.digests for cut in quantized.cuts), quantized.source.digests]
    algorithm = algorithm_of(made_of[0])
    found = {tensor.name: tensor_digest(whole, tensor, algorithm) for tensor in changed}
    if any(all(said.get(n) == digest for n, digest in found.items()) for said in made_of):
        return []
    key = "source.tensor_digests (before the cut)"
    pairs = {f"{key}.{n}": (digest, made_of[0].get(n)) for n, digest in found.items()}
    return recorded(pairs)[:1]


def _cut_faults(
    record: CutProvenance, quantized: QuantizedProvenance, anew: Collection[str]
) -> list[Fault]:
    """Seals, and that the cut changed nothing else of the quantized folder."""
    pairs: dict[str, tuple[object, object]] = {
        "sha256": (sealed(record).sha256, record.sha256 or "none"),
        "quantized_by.sha256": (sealed(quantized).sha256, quantized.sha256 or "none"),
    }
    modules = {name.removesuffix(".weight") for name in anew}
    for name, digest in quantized.digests.items():
        same = record.digests.get(name) == digest
        if not same and name not in anew and name.rpartition(".")[0] not in modules:
            said = f"{digest}, as before the cut", record.digests.get(name)
            pairs[f"tensor_digests.{name}"] = said
    return recorded(pairs)


def _of_cut(
    record: CutProvenance, quantized: QuantizedProvenance, wanted: Checkpoint, anew: Collection[str]
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
    source = replace(quantized.source, tensor_digests=digests, tensor_sha256={})
    return sealed(
        replace(
            quantized,
            source=source,
            tensor_digests=record.digests,
            tensor_sha256={},
            tensor_bytes=TensorBytes(before=wanted.nbytes, after=record.tensor_bytes.after),
            config_changes=changes,
        )
    )
