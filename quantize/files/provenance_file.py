"""draftquant.json: read strictly, sealed, and held against the folder that it lies in."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ...recipes.decode import encode
from ...recipes.errors import reason
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import CheckpointError
from .checkpoint import PROVENANCE_FILE
from .earlier_records import check_still_read
from .files_of_folder import check_own
from .provenance import Provenance

ProvenanceT = TypeVar("ProvenanceT", bound=Provenance)


def read_provenance(folder: Path) -> Provenance | None:
    """The draftquant.json of a folder; None where it has none.

    Raises:
        CheckpointError: it is not readable, or a key is unknown, missing, mistyped, or contradicts
            another; or only an earlier version reads what it records.
    """
    path = folder / PROVENANCE_FILE
    check_own(folder, PROVENANCE_FILE)
    if not path.exists():
        return None
    try:
        content = parse_object(read_text(path))
        check_still_read(path, content)
        found: Provenance = decode(Provenance, content)
    except (OSError, JsonProblem) as exc:
        raise CheckpointError(
            path,
            str(exc) if isinstance(exc, JsonProblem) else f"cannot be read: {reason(exc)}",
            fix="use the version of draftquant that wrote it, or copy or quantize the draft again",
        ) from exc
    return found


def sealed(provenance: ProvenanceT) -> ProvenanceT:
    """The same with its seal: the sha256 of all other keys as canonical JSON."""
    content = encode(dataclasses.replace(provenance, sha256=""))
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return dataclasses.replace(provenance, sha256=hashlib.sha256(text.encode()).hexdigest())


def check_seal(folder: Path, provenance: Provenance | None) -> None:
    """The draftquant.json of a folder, if it has one, is as it was written.

    Raises:
        CheckpointError: it was edited since.
    """
    if provenance is not None and provenance.sha256 != sealed(provenance).sha256:
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            f"sha256: not that of the other keys: {provenance.sha256!r}",
            fix="copy the folder or quantize the draft again: this record was edited",
        )


def check_recorded(folder: Path, recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    """The tensors of a folder still have the hashes that its draftquant.json records.

    Raises:
        CheckpointError: one has not.
    """
    changed = [name for name in sorted(found) if recorded.get(name) != found[name]]
    if changed:
        raise CheckpointError(
            folder,
            f"{changed[0]}: not the bytes whose digest was recorded when it was quantized"
            f" ({len(changed)} tensor(s) in all)",
            fix="copy the folder or quantize the draft again: its files have changed",
        )
