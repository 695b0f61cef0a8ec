"""A folder with a cut vocabulary, against the folder that it was made from.

Rows, maps and config are built from the source's rows again, by code that the writer does not use,
in a scratch file that is read like any checkpoint. So a folder that was quantized
before or after the cut is compared with the whole draft, without a folder in between.
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts import Draft, Row, read_config, read_draft
from ..drafts.geometry import MAP, MASK, SIZE_KEY
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import tensor_digest
from ..files.provenance import CutProvenance, Provenance, QuantizedProvenance, TensorBytes
from ..files.provenance_file import cuts_of, read_provenance, sealed
from ..files.safetensors_header import DTYPE_BYTES, TensorInfo
from ..stored.decoded_numbers import INTEGERS, Bytes, read_integers, read_rows, read_whole
from ..stored.stored_declaration import ZERO_POINTS, declared_scheme, looks_quantized, stored_parts
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import HEAD, StoredTables, first_differing_row
from .changed_values import different_keys
from .comparison import (
    Compared,
    Fault,
    NotFinite,
    Sides,
    VerifyReport,
    compare_all,
    compare_kept,
    hash_the_rest,
    matched,
)
from .demands import Record, record_faults, recorded
from .folder_faults import ONLY_OURS, file_faults

Ids = npt.NDArray[np.int64]
_BLOCK_ROWS = 4096
_AGAINST = "give the draft that was cut behind --against"


def token_ids(checkpoint: Checkpoint, draft: Draft) -> Ids:
    """The target id of every row of a head; VerifyError for families that cannot be cut."""
    why = draft.family.whole_vocabulary
    if why is not None:
        what = f"a {draft.family.name} draft has no cut vocabulary: {why}"
        raise VerifyError(draft.checkpoint.folder, what, fix=_AGAINST)
    row = draft.row(MAP)
    if row is None:
        return np.arange(draft.geometry.draft_vocab_size, dtype=np.int64)
    offsets = read_integers(checkpoint, row.tensor)
    return offsets + np.arange(len(offsets))


def _id_faults(ids: Ids, source: Draft) -> list[Fault]:
    """A cut's map must ascend through tokens of the target, with a row of the source for each."""
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
    stranger = np.setdiff1d(ids, token_ids(source.checkpoint, source))
    if len(stranger):
        got = f"target id {stranger[0]}, which the source has no row for ({len(stranger)} in all)"
        return [Fault(MAP, "rows of the source", got)]
    return []


@contextmanager
def cut_view(source: StoredDraft, ids: Ids, tables: StoredTables | None) -> Iterator[Checkpoint]:
    """What a folder becomes when its vocabulary is cut to these ascending target ids.

    A folder without a head gets rows of the target's `tables`, or no head where these are None.
    """
    draft = source.draft
    config = {**source.checkpoint.config, SIZE_KEY: len(ids)}
    places = {int(token): i for i, token in enumerate(token_ids(source.checkpoint, draft))}
    rows, resized = np.array([places[int(token)] for token in ids]), _resized(draft, config)
    with tempfile.TemporaryDirectory(prefix="draftquant-verify-") as folder:
        with Path(folder, "rows").open("wb") as stream:
            tensors = dict(source.checkpoint.tensors)
            for row in (row for row in draft.rows if row.canonical in resized):
                stored = source.parts(row) if source.is_quantized(row) else {"": row.tensor}
                for tensor in stored.values():
                    name, cut = tensor.name, _cut(source, row, tensor, rows)
                    tensors[name] = _written(stream, name, tensor.dtype, *cut)
            tensors |= {tensor.name: tensor for tensor in _maps(draft, ids, stream)}
            if tables is not None:
                head = tables.lm_head
                data, shape = _gathered(tables.checkpoint, head, ids), (len(ids), *head.shape[1:])
                tensors[HEAD] = _written(stream, HEAD, head.dtype, data, shape)
        yield replace(source.checkpoint, config=config, tensors=dict(sorted(tensors.items())))


def _written(
    stream: BinaryIO, name: str, dtype: str, blocks: Iterator[Bytes], shape: tuple[int, ...]
) -> TensorInfo:
    """A tensor appended to an open file, whose absolute path is then the tensor's file."""
    start = stream.tell()
    for block in blocks:
        stream.write(block.data)
    return TensorInfo(
        name=name, dtype=dtype, shape=shape, file=str(stream.name), start=start, stop=stream.tell()
    )


def _resized(draft: Draft, config: Mapping[str, Any]) -> frozenset[str]:
    """Canonical names of the tensors whose number of rows changes under this config."""
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
    if part.shape == tensor.shape:  # a scale of inputs
        return iter([read_whole(source.checkpoint, tensor)]), tensor.shape
    if scheme.transposed or tensor.shape[0] != whole or part.shape != shape:
        where = f"{source.checkpoint.folder}: {row.module}"
        raise VerifyError(
            where,
            f"{scheme} is not stored row by row, so no rows of it can be compared",
            fix="cut the BF16 draft, then quantize it, and verify that folder",
        )
    return _gathered(source.checkpoint, tensor, rows), shape


def _gathered(checkpoint: Checkpoint, tensor: TensorInfo, rows: Ids) -> Iterator[Bytes]:
    """Rows in the requested order: from each stretch of the tensor, those that lie in it."""
    width = tensor.nbytes // tensor.shape[0]
    first = 0
    while first < len(rows):
        low, ahead = int(rows[first]), rows[first : first + _BLOCK_ROWS]
        near = (ahead >= low) & (ahead < low + _BLOCK_ROWS)
        places = ahead[: [*near.tolist(), False].index(False)]
        stop = int(places.max()) + 1
        block = read_rows(checkpoint, tensor, low, stop).reshape(stop - low, width)
        yield block[places - low].reshape(-1)
        first += len(places)


def _maps(draft: Draft, ids: Ids, stream: BinaryIO) -> Iterator[TensorInfo]:
    offsets = (ids - np.arange(len(ids))).astype(np.dtype("<i8"))
    mask = np.isin(np.arange(draft.geometry.vocab_size), ids)
    for canonical, dtype, values in ((MAP, "I64", offsets), (MASK, "BOOL", mask)):
        row = draft.row(canonical)
        name = row.tensor.name if row is not None else canonical
        yield _written(stream, name, dtype, iter([values.view(np.uint8)]), values.shape)


class Between(NamedTuple):
    """What a quantized folder is compared with: the whole draft, or its cut.

    `recorded` is the folder's record, as if the folder had been quantized from `draft`.
    """

    draft: Draft
    recorded: Record | None
    faults: tuple[Fault, ...] = ()


def quantized_record(record: Record | CutProvenance | None) -> Record | None:
    """The record of the folder's quantization, whether it was cut afterwards or not."""
    return record.quantized_by if isinstance(record, CutProvenance) else record


@contextmanager
def cut_between(
    draft: Draft, output: Checkpoint, record: Record | CutProvenance | None, target: Path | None
) -> Iterator[Between]:
    """What to compare a folder with this record with, whether its vocabulary was cut or not."""
    quantized = quantized_record(record)
    if not isinstance(quantized, QuantizedProvenance) or not cuts_of(record):
        yield Between(draft=draft, recorded=quantized)
        return
    try:
        ids = token_ids(output, StoredDraft.look(output).draft)
        faults = _id_faults(ids, draft)
        is_same = len(ids) == draft.geometry.draft_vocab_size
    except CheckpointError as exc:
        faults = [Fault(exc.where, "a cut draft that can be read", exc.what)]
    if faults or (is_same and not isinstance(record, CutProvenance)):
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


def _tables(
    draft: Draft, output: Checkpoint, quantized: QuantizedProvenance, target: Path | None
) -> StoredTables | None:
    head = draft.row(HEAD)
    if head is not None and head.tensor.name in quantized.dropped:
        raise CheckpointError(
            output.folder,
            "its head was left to the target when it was quantized, and given back when its"
            " vocabulary was cut",
            fix="give the quantized folder that was cut behind --against",
        )
    if head is not None or "head" not in draft.family.shared_tables:
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
    """Refuse a draft that the folder was not made from; other tensors show the rest later."""
    sources = (*(cut.source for cut in quantized.cuts), quantized.source)
    made_of = [source.tensor_digests for source in sources]
    digests = {tensor.name: tensor_digest(whole, tensor) for tensor in changed}
    if any(all(known.get(n) == digest for n, digest in digests.items()) for known in made_of):
        return []
    key = "source.tensor_digests (before the cut)"
    pairs = {f"{key}.{n}": (digest, made_of[0].get(n)) for n, digest in digests.items()}
    return recorded(pairs)[:1]


def _cut_faults(
    record: CutProvenance, quantized: QuantizedProvenance, anew: Collection[str]
) -> list[Fault]:
    """Check seals, and that the cut changed nothing else in the quantized folder."""
    pairs: dict[str, tuple[object, object]] = {
        "sha256": (sealed(record).sha256, record.sha256 or "none"),
        "quantized_by.sha256": (sealed(quantized).sha256, quantized.sha256 or "none"),
    }
    modules = {name.removesuffix(".weight") for name in anew}
    for name, digest in quantized.tensor_digests.items():
        same = record.tensor_digests.get(name) == digest
        if not same and name not in anew and name.rpartition(".")[0] not in modules:
            pair = f"{digest}, as before the cut", record.tensor_digests.get(name)
            pairs[f"tensor_digests.{name}"] = pair
    return recorded(pairs)


def _of_cut(
    record: CutProvenance, quantized: QuantizedProvenance, wanted: Checkpoint, anew: Collection[str]
) -> QuantizedProvenance:
    """The record that the folder would have, had the cut draft been quantized."""
    digests = {
        name: tensor_digest(wanted, tensor)
        if name in anew
        else quantized.source.tensor_digests.get(name, "none")
        for name, tensor in wanted.tensors.items()
    }
    changes = {path: value for path, value in quantized.config_changes.items() if path != SIZE_KEY}
    source = replace(quantized.source, tensor_digests=digests)
    return sealed(
        replace(
            quantized,
            source=source,
            tensor_digests=record.tensor_digests,
            tensor_bytes=TensorBytes(before=wanted.nbytes, after=record.tensor_bytes.after),
            config_changes=changes,
        )
    )


def cut_of(output: Path, source: Checkpoint) -> CutProvenance | None:
    """The record of a folder to be compared as a cut of this source; None if it is not a cut."""
    try:
        record = read_provenance(output)
    except CheckpointError:  # a fault of the folder, which the comparison finds
        return None
    if not isinstance(record, CutProvenance):
        return None
    if record.quantized_by is None or looks_quantized(source):
        return record
    if isinstance(record.quantized_by, QuantizedProvenance):
        return None  # the whole draft, quantized: see `cut_between`
    raise CheckpointError(
        output,
        "its vocabulary was cut after another tool had quantized it, so it is verified against the"
        " quantized folder",
        fix="give that folder behind --against",
    )


def verify_cut(
    output: Path,
    source: StoredDraft,
    record: CutProvenance | None = None,
    *,
    target_ids: Sequence[int] | Ids | None = None,
    target: Path | None,
    config_file: str = CONFIG_FILE,
) -> VerifyReport:
    """Check every byte of a cut folder; a truncated or lying file in it is a fault as well.

    Args:
        record: its draftquant.json; None for a run that has recorded nothing yet.
        target: folder of the target, where the source has no head: its rows are compared again;
            without it, only their recorded digest is.
    """
    own_ids = token_ids(source.checkpoint, source.draft)
    try:
        checkpoint = Checkpoint.open(output, config_file=config_file)
        ids = token_ids(checkpoint, StoredDraft.read(checkpoint).draft)
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(exc.where, "a cut draft that can be read", exc.what)
        folders = str(output), str(source.checkpoint.folder)
        return VerifyReport(output=folders[0], source=folders[1], faults=(fault,))
    faults = _id_faults(ids, replace(source.draft, checkpoint=source.checkpoint))
    if target_ids is not None and ids.tolist() != list(target_ids):
        faults.append(Fault(MAP, f"the {len(target_ids)} chosen ids", f"{len(ids)} others"))
    if faults:
        return _report(checkpoint, source, ids, Compared(faults=faults))
    tables = None if target is None or source.draft.row(HEAD) else StoredTables.find(target)
    with cut_view(source, ids, tables) as wanted:
        lent = tables is None and HEAD not in wanted.tensors  # rows of an absent target
        unshown = lent and HEAD in checkpoint.tensors
        tensors = {n: t for n, t in checkpoint.tensors.items() if not (unshown and n == HEAD)}
        alike, faults = matched(wanted.tensors, tensors)
        sides = Sides(wanted, checkpoint)
        whole = compare_all(alike, partial(_compare, sides, ids))
    scheme = declared_scheme(checkpoint)
    whole.faults = [
        *faults,
        *whole.faults,
        *file_faults(source.checkpoint, checkpoint, scheme, without=ONLY_OURS),
        *different_keys(wanted.config, checkpoint.config, but=()),
    ]
    before = source.checkpoint.tensors
    same = {n: d for n, d in whole.source_digests.items() if wanted.tensors[n] == before.get(n)}
    whole.source_digests = same
    hash_the_rest(replace(sides, source=source.checkpoint), whole)
    if record is not None:
        draft = replace(source.draft, checkpoint=source.checkpoint)
        whole.faults += record_faults(record, draft, checkpoint, whole)
        sizes = len(own_ids), len(ids)
        whole.faults += _size_faults(record, source, sizes, tables, unshown=unshown)
        whole.faults += _lineage_faults(record, read_provenance(source.checkpoint.folder))
    return _report(checkpoint, source, ids, whole, unshown=unshown)


def _report(
    output: Checkpoint, source: StoredDraft, ids: Ids, compared: Compared, *, unshown: bool = False
) -> VerifyReport:
    scheme, vocabulary = declared_scheme(output), source.draft.geometry.vocab_size
    return VerifyReport(
        output=str(output.folder),
        source=str(source.checkpoint.folder),
        scheme=str(scheme) if scheme else None,
        rule="every kept row is the source's, and the maps say of which token",
        kept=len(compared.output_digests),
        bytes_compared=source.checkpoint.nbytes + output.nbytes,
        faults=tuple(compared.faults),
        vocabulary=f"vocabulary {len(ids):,} of {vocabulary:,}",
        head_unshown=unshown,
        **compared.digests,
    )


def _compare(sides: Sides, ids: Ids, tensor: TensorInfo) -> Compared:
    """Compare bytes; for a tensor with a row per kept token, a fault names the first wrong row."""
    compared, output = compare_kept(sides, tensor), sides.output
    changed = [fault for fault in compared.faults if not isinstance(fault, NotFinite)]
    if changed and tensor.shape[:1] == (len(ids),):
        other = output.tensors[tensor.name]
        row = first_differing_row(sides.source, tensor, output, other) or 0
        expected = f"the source's bytes of target id {ids[row]}"
        compared.faults = [Fault(tensor.name, expected, f"others in row {row}; {changed[0].got}")]
    return compared


def _size_faults(
    record: CutProvenance,
    source: StoredDraft,
    sizes: tuple[int, int],
    tables: StoredTables | None,
    *,
    unshown: bool,
) -> list[Fault]:
    """What is recorded of the cut itself; `sizes` are the numbers of rows before and after it."""
    cut = record.cut
    pairs: dict[str, tuple[object, object]] = {
        "vocabulary": (source.draft.geometry.vocab_size, cut.vocabulary),
        "size_before": (sizes[0], cut.size_before),
        "size": (sizes[1], cut.size),
    }
    head_from = cut.head_from
    if tables is not None:
        digest = tensor_digest(tables.checkpoint, tables.lm_head)
        recorded_head = (head_from.tensor, head_from.digest) if head_from else None
        pairs["head_from"] = (tables.lm_head.name, digest), recorded_head
    elif unshown:
        pairs["head_from"] = (True, head_from is not None)
    elif head_from is not None:
        pairs["head_from"] = (None, head_from.tensor)
    last = f"cuts[{len(record.cuts) - 1}]"
    return recorded({f"{last}.{key}": pair for key, pair in pairs.items()})


def _lineage_faults(record: CutProvenance, before: Provenance | None) -> list[Fault]:
    pairs: dict[str, tuple[object, object]] = {}
    earlier = before.cuts if isinstance(before, CutProvenance) else ()
    if record.cuts[:-1] != earlier:
        pairs["cuts"] = f"the source's {len(earlier)} earlier cut(s)", "others"
    quantized = before.quantized_by if isinstance(before, CutProvenance) else before
    if record.quantized_by != quantized:
        got = record.quantized_by.sha256 if record.quantized_by else "none"
        wanted = f"the source's record ({quantized.sha256 if quantized else 'none'})"
        pairs["quantized_by"] = wanted, got
    return recorded(pairs)
