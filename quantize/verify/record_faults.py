"""draftquant.json against what it speaks of: all that can be computed again, and its seal."""

from collections.abc import Mapping
from pathlib import Path

from ..drafts import Draft
from ..errors import CheckpointError
from ..files.checkpoint import PROVENANCE_FILE, Checkpoint
from ..files.provenance import (
    CutProvenance,
    DequantizedProvenance,
    GraftedProvenance,
    QuantizedProvenance,
    TranscodedProvenance,
)
from ..files.provenance_file import read_provenance, sealed
from .verify_report import Fault

Record = QuantizedProvenance | TranscodedProvenance
"""Of a folder that holds codes."""
NO_RECORD = Fault(
    where=PROVENANCE_FILE,
    expected="the record of the run",
    got="none. If another tool made the folder, pass --foreign",
)


def read_record(folder: Path) -> Record | CutProvenance | None:
    """What this package recorded when it made or cut a folder; None = nothing.

    Raises:
        CheckpointError: draftquant.json is damaged, or that of a dequantized folder.
    """
    recorded = read_provenance(folder)
    if isinstance(recorded, DequantizedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "there is nothing to verify: the folder was dequantized, and holds no quantized values",
            fix="verify the quantized folder that it was made from",
        )
    if isinstance(recorded, GraftedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "the folder is a target's, into which an MTP layer was grafted",
            fix="draftquant verify it --against the target as it was",
        )
    return recorded


def recorded_changes(recorded: Record | None) -> Mapping[str, object] | None:
    """None where nothing says what config.json must be: it is another tool's."""
    return recorded.config_changes if isinstance(recorded, QuantizedProvenance) else None


def record_faults(
    recorded: Record | CutProvenance,
    draft: Draft,
    output: Checkpoint,
    source_digests: Mapping[str, str],
    output_digests: Mapping[str, str],
) -> list[Fault]:
    """What a record says is so.
    """
    faults = _hash_faults("tensor_digests", recorded.digests, output_digests)
    if not isinstance(recorded, TranscodedProvenance):
        source = recorded.source
        faults += _hash_faults("source.tensor_digests", source.digests, source_digests)
        faults += _value_faults(
            {
                "source.family": (draft.family.name, source.family),
                "tensor_bytes.before": (draft.checkpoint.nbytes, recorded.tensor_bytes.before),
                "tensor_bytes.after": (output.nbytes, recorded.tensor_bytes.after),
            }
        )
    seal = sealed(recorded).sha256
    return faults + _value_faults({"sha256": (seal, recorded.sha256 or "none")})


def _hash_faults(key: str, said: Mapping[str, str], computed: Mapping[str, str]) -> list[Fault]:
    names = sorted(said.keys() | computed.keys())
    return _value_faults({f"{key}.{name}": (computed.get(name), said.get(name)) for name in names})


def _value_faults(pairs: Mapping[str, tuple[object, object]]) -> list[Fault]:
    return [
        Fault(where=f"{PROVENANCE_FILE}: {key}", expected=str(wanted), got=str(said))
        for key, (wanted, said) in pairs.items()
        if wanted != said
    ]
