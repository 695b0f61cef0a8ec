"""Re-reading an unquantized draft that a target taught, against the draft that it was made of.

Everything but the linears that learned is the source's, byte for byte. Of these it shows that they
are finite weights that point where the source's do, and that they are those that were recorded;
that training made them as it says, nothing can show but training again. Imports no torch.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ...recipes.roles import LAYER_ROLES
from ..drafts import Draft, Row
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Algorithm, Digest, algorithm_of, tensor_digest
from ..files.provenance import TunedProvenance
from ..files.workers import WORKERS
from ..stored.declarations import declared_scheme
from ..stored.decoded_numbers import floats, read_rows
from .config_json import config_faults
from .headers import form, index_faults, metadata_faults
from .kept_tensors import compare_kept
from .record_faults import record_faults
from .retuned_codes import Direction
from .unowned_files import own_files, side_file_faults, unowned_faults
from .verify_report import Compared, Fault, LinearFinding, VerifyReport, blocks_of

RULE = "finite weights that point in the direction of the source's weights"
_BLOCK = 2**18  # weights


def verify_tuned(
    output: Path,
    draft: Draft,
    recorded: TunedProvenance | None = None,
    *,
    linears: Collection[str] = (),
    config_file: str = CONFIG_FILE,
) -> VerifyReport:
    """Check every byte of a tuned folder.

    Args:
        output: the folder.
        draft: its source.
        recorded: its draftquant.json; None for a run that has not recorded anything yet.
        linears: on-disk names of the modules that learned, for that run.
        config_file: its name in a staging folder, see `Checkpoint.open`.

    Raises:
        CheckpointError: `output` is no checkpoint.
    """
    checkpoint, source = Checkpoint.open(output, config_file=config_file), draft.checkpoint
    learned = frozenset(recorded.retuning.linears if recorded else linears)
    faults = _header_faults(draft, checkpoint, learned, config_file)
    algorithm = algorithm_of(recorded.digests) if recorded else NEWEST
    compare = partial(_compare, source, checkpoint, learned, algorithm)
    alike = [row for row in draft.rows if _same_form(row, checkpoint)]
    with ThreadPoolExecutor(WORKERS) as pool:
        compared = list(pool.map(compare, alike))
    source_digests: dict[str, str] = {}
    output_digests: dict[str, str] = {}
    for one in compared:
        source_digests |= one.source_digests
        output_digests |= one.output_digests
        faults += one.faults
    for side, hashes in ((source, source_digests), (checkpoint, output_digests)):
        for name in side.tensors.keys() - hashes.keys():
            hashes[name] = tensor_digest(side, side.tensors[name], algorithm)
    if recorded is not None:
        faults += record_faults(recorded, draft, checkpoint, source_digests, output_digests)
    found = tuple(one.linear for one in compared if one.linear is not None)
    return VerifyReport(
        output=str(output),
        source=str(source.folder),
        scheme=None,
        rule=RULE,
        kept=len(compared) - len(found),
        quantized=len(found),
        bytes_compared=source.nbytes + checkpoint.nbytes,
        linears=found,
        source_digests=dict(sorted(source_digests.items())),
        output_digests=dict(sorted(output_digests.items())),
        faults=tuple(faults),
        retuned=True,
    )


def _header_faults(
    draft: Draft, output: Checkpoint, learned: frozenset[str], config_file: str
) -> list[Fault]:
    source = draft.checkpoint
    scheme = declared_scheme(output)
    faults = [] if scheme is None else [
        Fault(where=CONFIG_FILE, expected="no quantization_config", got=str(scheme))
    ]  # fmt: skip
    for name in sorted(source.tensors.keys() | output.tensors.keys()):
        wanted, found = source.tensors.get(name), output.tensors.get(name)
        expected = form(wanted) if wanted else "no such tensor"
        got = form(found) if found else "none"
        if expected != got:
            faults.append(Fault(where=name, expected=expected, got=got))
    linears = {row.module for row in draft.linears() if row.role in LAYER_ROLES}
    for module in sorted(learned - linears):
        expected, got = "no such linear to learn", "retuning.linears names it"
        faults.append(Fault(where=module, expected=expected, got=got))
    return [
        *faults,
        *config_faults(draft, output, {}),
        *index_faults(output),
        *metadata_faults(source, output),
        *side_file_faults(source, output),
        *unowned_faults(source, output, config_file=config_file, own=own_files(None)),
    ]


def _same_form(row: Row, output: Checkpoint) -> bool:
    stored = output.tensors.get(row.tensor.name)
    return stored is not None and form(stored) == form(row.tensor)


def _compare(
    source: Checkpoint,
    output: Checkpoint,
    learned: frozenset[str],
    algorithm: Algorithm,
    row: Row,
) -> Compared:
    """A tensor on both sides, of one dtype and shape."""
    if row.module not in learned or row.role not in LAYER_ROLES:
        return compare_kept(source, output, row.tensor, lambda _count: None, algorithm)
    tensor, stored = row.tensor, output.tensors[row.tensor.name]
    digests = Digest(algorithm), Digest(algorithm)
    direction, lost, bad = Direction(), 0.0, 0
    for rows in blocks_of(tensor.shape[0], max(1, _BLOCK // max(1, tensor.shape[1]))):
        sides = [
            read_rows(c, t, rows.start, rows.stop) for c, t in ((source, tensor), (output, stored))
        ]
        for digest, side in zip(digests, sides, strict=True):
            digest.update(side.data)
        before, after = (floats(s, tensor.dtype).reshape(len(rows), -1) for s in sides)
        bad += int(np.count_nonzero(~np.isfinite(after)))
        with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
            direction.add(before, after)
            lost += float(np.square(before - after).sum(dtype=np.float64))
    faults = direction.faults(tensor.name)
    if bad:
        faults = [Fault(where=tensor.name, expected="finite weights", got=f"{bad} other(s)")]
    return Compared(
        source_digests={tensor.name: str(digests[0])},
        output_digests={tensor.name: str(digests[1])},
        faults=faults,
        linear=LinearFinding(
            module=row.module,
            wrong_codes=0,
            max_error=None,
            relative_l2_error=(lost / direction.square) ** 0.5 if direction.square else 0.0,
        ),
    )
