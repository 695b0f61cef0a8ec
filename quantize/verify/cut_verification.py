"""A folder whose vocabulary was cut, against the folder that it was made from.

What must be is built again from the source (`cut_view`); nothing else changed. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts.geometry import MAP
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, algorithm_of, tensor_digest
from ..files.provenance import CutProvenance, Provenance, QuantizedProvenance
from ..files.provenance_file import read_provenance
from ..files.safetensors_header import TensorInfo
from ..stored.stored_declaration import declared_scheme, looks_quantized
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import HEAD, StoredTables, first_differing_row
from .changed_values import different_keys
from .comparison import (
    Compared,
    Fault,
    NotFinite,
    VerifyReport,
    compare_all,
    compare_kept,
    hash_the_rest,
    matched,
)
from .cut_view import Ids, cut_view, map_faults, stranger_faults, token_ids
from .demands import record_faults, recorded
from .folder_faults import ONLY_OURS, file_faults


def cut_of(output: Path, source: Checkpoint) -> CutProvenance | None:
    """The record of a folder that is to be compared as a cut of this source; None if it is none.

    CheckpointError where another tool quantized it before it was cut, and the source is
    unquantized.
    """
    try:
        record = read_provenance(output)
    except CheckpointError:  # a fault of the folder, which whoever compares it finds
        return None
    if not isinstance(record, CutProvenance):
        return None
    if record.quantized_by is None or looks_quantized(source):
        return record
    if isinstance(record.quantized_by, QuantizedProvenance):
        return None  # of the whole draft, quantized: see `cut_between`
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
    target: Path | None = None,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> VerifyReport:
    """Check every byte of a cut folder; a truncated or lying file of it is a fault as well.

    Args:
        record: its draftquant.json; None for a run that has not recorded anything yet.
        target: folder of the target, where the source has no head: its rows are compared again.
            Without it they are those whose digest is recorded.

    Raises:
        VerifyError: no draft of the source's family is cut.
        CheckpointError: the source shrank or vanished, or the target has no head.
    """
    own_ids = token_ids(source.checkpoint, source.draft)
    try:
        checkpoint = Checkpoint.open(output, config_file=config_file)
        ids = token_ids(checkpoint, StoredDraft.read(checkpoint).draft)
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(exc.where, "a cut draft that can be read", exc.what)
        folders = str(output), str(source.checkpoint.folder)
        return VerifyReport(output=folders[0], source=folders[1], faults=(fault,))
    faults = map_faults(ids, source.draft)
    if target_ids is not None and ids.tolist() != list(target_ids):
        faults.append(Fault(MAP, f"the {len(target_ids)} chosen ids", f"{len(ids)} others"))
    if faults := faults or stranger_faults(ids, source.checkpoint, source.draft):
        return _report(checkpoint, source, ids, Compared(faults=faults))
    tables = None if target is None or source.draft.row(HEAD) else StoredTables.find(target)
    if record is not None:
        algorithm = algorithm_of(record.digests)
    with cut_view(source, ids, tables) as wanted:
        lent = tables is None and HEAD not in wanted.tensors  # rows of a target not at hand
        unshown = lent and HEAD in checkpoint.tensors
        found = {n: t for n, t in checkpoint.tensors.items() if not (unshown and n == HEAD)}
        alike, faults = matched(wanted.tensors, found)
        whole = compare_all(alike, partial(_compare, wanted, checkpoint, ids, algorithm))
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
    hash_the_rest(checkpoint, whole.output_digests, algorithm)
    hash_the_rest(source.checkpoint, whole.source_digests, algorithm)
    if record is not None:
        draft = replace(source.draft, checkpoint=source.checkpoint)
        whole.faults += record_faults(record, draft, checkpoint, whole)
        sizes = len(own_ids), len(ids)
        whole.faults += _cut_faults(record, source, sizes, tables, unshown=unshown)
        whole.faults += _lineage_faults(record, read_provenance(source.checkpoint.folder))
    return _report(checkpoint, source, ids, whole, unshown=unshown)


def _report(
    output: Checkpoint, source: StoredDraft, ids: Ids, found: Compared, *, unshown: bool = False
) -> VerifyReport:
    scheme, vocabulary = declared_scheme(output), source.draft.geometry.vocab_size
    return VerifyReport(
        output=str(output.folder),
        source=str(source.checkpoint.folder),
        scheme=str(scheme) if scheme else None,
        rule="every kept row is the source's, and the maps say of which token",
        kept=len(found.output_digests),
        bytes_compared=source.checkpoint.nbytes + output.nbytes,
        faults=tuple(found.faults),
        vocabulary=f"vocabulary {len(ids):,} of {vocabulary:,}",
        head_unshown=unshown,
        **found.digests,
    )


def _compare(
    wanted: Checkpoint, output: Checkpoint, ids: Ids, algorithm: Algorithm, tensor: TensorInfo
) -> Compared:
    """Bytes; of what has a row for each kept token, a fault names the first wrong one."""
    found = compare_kept(wanted, output, tensor, algorithm=algorithm)
    changed = [fault for fault in found.faults if not isinstance(fault, NotFinite)]
    if changed and tensor.shape[:1] == (len(ids),):
        row = first_differing_row(wanted, tensor, output, output.tensors[tensor.name]) or 0
        expected = f"the source's bytes of target id {ids[row]}"
        found.faults = [Fault(tensor.name, expected, f"others in row {row}; {changed[0].got}")]
    return found


def _cut_faults(
    record: CutProvenance,
    source: StoredDraft,
    sizes: tuple[int, int],
    tables: StoredTables | None,
    *,
    unshown: bool,
) -> list[Fault]:
    """What is recorded of the cut itself; `sizes` are the rows before and after it."""
    cut = record.cut
    pairs: dict[str, tuple[object, object]] = {
        "vocabulary": (source.draft.geometry.vocab_size, cut.vocabulary),
        "size_before": (sizes[0], cut.size_before),
        "size": (sizes[1], cut.size),
    }
    said = cut.head_from
    if tables is not None:
        digest = tensor_digest(tables.checkpoint, tables.lm_head, NEWEST)
        recorded_head = (said.tensor, said.digest) if said else None
        pairs["head_from"] = (tables.lm_head.name, digest), recorded_head
    elif unshown:
        pairs["head_from"] = (True, said is not None)
    elif said is not None:
        pairs["head_from"] = (None, said.tensor)
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
