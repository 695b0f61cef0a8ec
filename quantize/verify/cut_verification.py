"""Re-reading a folder whose vocabulary was cut, against the folder that it was made from.

Every kept row has the source's bytes and every entry of the maps is right, since what must be is
built again from the source; nothing else changed. Imports no torch.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts.geometry import MAP
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, algorithm_of, tensor_digest
from ..files.provenance import CutProvenance, Provenance, QuantizedProvenance
from ..files.provenance_file import read_provenance
from ..files.safetensors_header import WORKERS, TensorInfo
from ..stored.decoded_numbers import read_rows
from ..stored.stored_declaration import declared_scheme, looks_quantized
from ..stored.stored_draft import StoredDraft
from ..stored.stored_tables import HEAD, StoredTables
from .cut_view import Ids, check_may_be_cut, cut_view, map_faults, token_ids
from .demands import record_faults
from .folder_faults import (
    ONLY_OURS,
    form,
    index_faults,
    metadata_faults,
    own_files,
    side_file_faults,
    unowned_faults,
)
from .verify_report import (
    Compared,
    Fault,
    NotFinite,
    VerifyReport,
    blocks_of,
    compare_kept,
    unreadable,
)

_BLOCK_BYTES = 8 << 20


def verify_cut(
    output: Path,
    source: StoredDraft,
    recorded: CutProvenance | None = None,
    *,
    target_ids: Sequence[int] | Ids | None = None,
    target: Path | None = None,
    config_file: str = CONFIG_FILE,
    algorithm: Algorithm = NEWEST,
) -> VerifyReport:
    """Check every byte of a cut folder.

    Args:
        recorded: its draftquant.json; None for a run that has not recorded anything yet.
        target_ids: that run's tokens.
        target: folder of the target, where the source has no head: its rows are compared again.
            Without it they are those whose digest is recorded.
        config_file: its name in a staging folder, see `Checkpoint.open`.
        algorithm: of the digests, for that run.

    Returns:
        A report with all faults. A truncated or lying file of the output is a fault as well.

    Raises:
        VerifyError: no draft of the source's family is cut.
        CheckpointError: the source shrank or vanished, or the target has no head.
    """
    check_may_be_cut(source.draft)
    try:
        checkpoint = Checkpoint.open(output, config_file=config_file)
        stored = StoredDraft.read(checkpoint)
        ids = token_ids(checkpoint, stored.draft)
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(where=exc.where, expected="a cut draft that can be read", got=exc.what)
        return unreadable(output, source.checkpoint.folder, fault)
    faults = map_faults(ids, source.draft.geometry.vocab_size)
    if target_ids is not None and ids.tolist() != list(target_ids):
        expected, got = f"the {len(target_ids)} chosen ids", f"{len(ids)} others"
        faults.append(Fault(where=MAP, expected=expected, got=got))
    stranger = np.setdiff1d(ids, token_ids(source.checkpoint, source.draft))
    if len(stranger) and not faults:
        got = f"target id {stranger[0]}, which the source has no row for ({len(stranger)} in all)"
        faults.append(Fault(where=MAP, expected="rows of the source", got=got))
    if faults:
        return _report(checkpoint, source, ids, faults)
    tables = None if target is None or source.draft.row(HEAD) else StoredTables.find(target)
    if recorded is not None:
        algorithm = algorithm_of(recorded.digests)
    with cut_view(source, ids, tables) as wanted:
        compared, unshown = _compare(wanted, checkpoint, ids, algorithm, lent=tables is None)
    faults = [
        *(fault for one in compared for fault in one.faults),
        *_folder_faults(source.checkpoint, checkpoint, config_file),
        *_config_faults(wanted, checkpoint),
    ]
    of_output = {k: v for one in compared for k, v in one.output_digests.items()}
    of_source = {
        name: digest
        for one in compared
        for name, digest in one.source_digests.items()
        if wanted.tensors[name] == source.checkpoint.tensors.get(name)
    }
    hash_the_rest(checkpoint, of_output, algorithm)
    hash_the_rest(source.checkpoint, of_source, algorithm)
    if recorded is not None:
        draft = replace(source.draft, checkpoint=source.checkpoint)
        faults += record_faults(recorded, draft, checkpoint, of_source, of_output)
        faults += _cut_faults(recorded, source, ids, tables, unshown=unshown)
        faults += _lineage_faults(recorded, read_provenance(source.checkpoint.folder))
    return _report(checkpoint, source, ids, faults, (of_source, of_output), unshown=unshown)


def hash_the_rest(checkpoint: Checkpoint, digests: dict[str, str], algorithm: Algorithm) -> None:
    """Add the digests of the tensors that have none yet."""
    left = [tensor for name, tensor in checkpoint.tensors.items() if name not in digests]
    with ThreadPoolExecutor(WORKERS) as pool:
        hashed = pool.map(lambda tensor: tensor_digest(checkpoint, tensor, algorithm), left)
        digests |= {tensor.name: one for tensor, one in zip(left, hashed, strict=True)}


def cut_of(output: Path, source: Checkpoint) -> CutProvenance | None:
    """The record of a folder that is to be compared as a cut of this source; None if it is none.

    Raises:
        CheckpointError: it was quantized by another tool before it was cut, and the source is the
            draft before that.
    """
    try:
        recorded = read_provenance(output)
    except CheckpointError:  # a fault of the folder, which whoever compares it finds
        return None
    if not isinstance(recorded, CutProvenance):
        return None
    if recorded.quantized_by is None or looks_quantized(source):
        return recorded
    if isinstance(recorded.quantized_by, QuantizedProvenance):
        return None  # of the whole draft, quantized: see `cut_before`
    raise CheckpointError(
        output,
        "its vocabulary was cut after another tool had quantized it, so it is verified against the"
        " quantized folder",
        fix="give that folder behind --against",
    )


def _report(
    output: Checkpoint,
    source: StoredDraft,
    ids: Ids,
    faults: list[Fault],
    digests: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    *,
    unshown: bool = False,
) -> VerifyReport:
    scheme, vocabulary = declared_scheme(output), source.draft.geometry.vocab_size
    return VerifyReport(
        output=str(output.folder),
        source=str(source.checkpoint.folder),
        scheme=str(scheme) if scheme else None,
        rule="every kept row is the source's, and the maps say of which token",
        kept=len(digests[1]),
        quantized=0,
        bytes_compared=source.checkpoint.nbytes + output.nbytes,
        linears=(),
        source_digests=dict(sorted(digests[0].items())),
        output_digests=dict(sorted(digests[1].items())),
        faults=tuple(faults),
        vocabulary=f"vocabulary {len(ids):,} of {vocabulary:,}",
        head_unshown=unshown,
    )


def _compare(
    wanted: Checkpoint, output: Checkpoint, ids: Ids, algorithm: Algorithm, *, lent: bool
) -> tuple[list[Compared], bool]:
    """Every tensor on both sides.

    Args:
        wanted: what must be there.
        lent: the head may be rows of a target that is not at hand.

    Returns:
        What was found, and whether there are such rows.
    """
    faults, alike = [], []
    unshown = lent and HEAD in output.tensors and HEAD not in wanted.tensors
    for name in sorted(wanted.tensors.keys() | output.tensors.keys()):
        want, found = wanted.tensors.get(name), output.tensors.get(name)
        if unshown and name == HEAD:
            continue
        if want is not None and found is not None and form(want) == form(found):
            alike.append(want)
            continue
        expected = form(want) if want else "no such tensor"
        got = form(found) if found else "none"
        faults.append(Fault(where=name, expected=expected, got=got))
    compare = partial(_compare_tensor, wanted, output, ids, algorithm)
    with ThreadPoolExecutor(WORKERS) as pool:
        return [Compared(faults=faults), *pool.map(compare, alike)], unshown


def _compare_tensor(
    wanted: Checkpoint, output: Checkpoint, ids: Ids, algorithm: Algorithm, tensor: TensorInfo
) -> Compared:
    """Bytes; of what has a row for each kept token, a fault names the first wrong one."""
    found = compare_kept(wanted, output, tensor, lambda _count: None, algorithm)
    changed = [fault for fault in found.faults if not isinstance(fault, NotFinite)]
    if changed and tensor.shape[:1] == (len(ids),):
        row = _first_wrong_row(wanted, output, tensor)
        expected = f"the source's bytes of target id {ids[row]}"
        got = f"others in row {row}; {changed[0].got}"
        found.faults = [Fault(where=tensor.name, expected=expected, got=got)]
    return found


def _first_wrong_row(wanted: Checkpoint, output: Checkpoint, tensor: TensorInfo) -> int:
    rows = tensor.shape[0]
    other = output.tensors[tensor.name]
    for block in blocks_of(rows, max(1, _BLOCK_BYTES * rows // max(1, tensor.nbytes))):
        a = read_rows(wanted, tensor, block.start, block.stop).reshape(len(block), -1)
        b = read_rows(output, other, block.start, block.stop).reshape(len(block), -1)
        wrong = (a != b).any(axis=1)
        if wrong.any():
            return block.start + int(wrong.argmax())
    return 0


def _config_faults(wanted: Checkpoint, output: Checkpoint) -> list[Fault]:
    """The source's config, but for the number of rows; as text, which tells 1 from true."""
    faults = []
    for key in sorted(wanted.config.keys() | output.config.keys()):
        expected, got = (
            json.dumps(each.config[key]) if key in each.config else "no such key"
            for each in (wanted, output)
        )
        if expected != got:
            faults.append(Fault(where=f"{CONFIG_FILE}: {key}", expected=expected, got=got))
    return faults


def _folder_faults(source: Checkpoint, output: Checkpoint, config_file: str) -> list[Fault]:
    """Index and files: the source's, but for what is ours."""
    scheme = declared_scheme(output)
    side = scheme.layout.side_file if scheme else None
    own = own_files(side.name if side else None)
    return [
        *index_faults(output),
        *metadata_faults(source, output),
        *side_file_faults(source, output, without=ONLY_OURS),
        *unowned_faults(source, output, config_file=config_file, own=own, without=ONLY_OURS),
    ]


def _cut_faults(
    recorded: CutProvenance,
    source: StoredDraft,
    ids: Ids,
    tables: StoredTables | None,
    *,
    unshown: bool,
) -> list[Fault]:
    """What is recorded of the cut itself."""
    cut, g = recorded.cut, source.draft.geometry
    last = f"cuts[{len(recorded.cuts) - 1}]"
    pairs: dict[str, tuple[object, object]] = {
        "vocabulary": (g.vocab_size, cut.vocabulary),
        "size_before": (len(token_ids(source.checkpoint, source.draft)), cut.size_before),
        "size": (len(ids), cut.size),
    }
    if tables is not None:
        digest = tensor_digest(tables.checkpoint, tables.lm_head, NEWEST)
        said = cut.head_from
        pairs["head_from"] = (
            (tables.lm_head.name, digest),
            (said.tensor, said.digest) if said else None,
        )
    elif unshown:
        pairs["head_from"] = (True, cut.head_from is not None)
    elif cut.head_from is not None:
        pairs["head_from"] = (None, cut.head_from.tensor)
    return [
        Fault(where=f"{PROVENANCE_FILE}: {last}.{key}", expected=str(wanted), got=str(got))
        for key, (wanted, got) in pairs.items()
        if wanted != got
    ]


def _lineage_faults(recorded: CutProvenance, before: Provenance | None) -> list[Fault]:
    """It carries the record of the folder that was cut."""
    earlier = before.cuts if isinstance(before, CutProvenance) else ()
    faults = []
    if recorded.cuts[:-1] != earlier:
        expected, got = f"the source's {len(earlier)} earlier cut(s)", "others"
        faults.append(Fault(where=f"{PROVENANCE_FILE}: cuts", expected=expected, got=got))
    quantized = before.quantized_by if isinstance(before, CutProvenance) else before
    if recorded.quantized_by != quantized:
        where = f"{PROVENANCE_FILE}: quantized_by"
        got = recorded.quantized_by.sha256 if recorded.quantized_by else "none"
        expected = f"the source's record ({quantized.sha256 if quantized else 'none'})"
        faults.append(Fault(where=where, expected=expected, got=got))
    return faults
