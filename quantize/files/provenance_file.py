"""draftquant.json: read strictly, sealed, and compared with the folder that contains it."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...recipes.decode import encode
from ...recipes.errors import CheckpointError
from ...recipes.packages import package_version
from ...recipes.regular_file import check_own, read_text
from ...recipes.schema import Recipe, recipe_sha256
from ...recipes.strict_json import decode, parse_object, reading
from . import provenance as records
from .checkpoint import PROVENANCE_FILE
from .hub import recorded_argv

ProvenanceT = TypeVar("ProvenanceT", bound=records.Provenance)


def read_provenance(folder: Path) -> records.Provenance | None:
    """The draftquant.json of a folder, every key understood; None where it has none."""
    path = folder / PROVENANCE_FILE
    check_own(folder, PROVENANCE_FILE)
    if not path.exists():
        return None
    fix = "use the version of draftquant that wrote it, or copy or quantize the draft again"
    with reading(path, CheckpointError, fix):
        content = parse_object(read_text(path))
        record: records.Provenance = decode(records.Provenance, content)
    return record


def sealed(provenance: ProvenanceT) -> ProvenanceT:
    """The same with its seal: the sha256 of all other keys as canonical JSON."""
    content = encode(dataclasses.replace(provenance, sha256=""))
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return dataclasses.replace(provenance, sha256=hashlib.sha256(text.encode()).hexdigest())


def check_seal(folder: Path, provenance: records.Provenance | None) -> None:
    """Refuse a draftquant.json that was edited; a folder may have none."""
    if provenance is not None and provenance.sha256 != sealed(provenance).sha256:
        what = f"sha256: not that of the other keys: {provenance.sha256!r}"
        fix = "copy the folder or quantize the draft again: this record was edited"
        raise CheckpointError(folder / PROVENANCE_FILE, what, fix=fix)


def check_recorded(folder: Path, recorded: Mapping[str, str], computed: Mapping[str, str]) -> None:
    """Refuse tensors whose digests differ from those in the folder's draftquant.json."""
    changed = [name for name in sorted(computed) if recorded.get(name) != computed[name]]
    if changed:
        what = "not the bytes whose digest was recorded when it was quantized"
        what = f"{changed[0]}: {what} ({len(changed)} tensor(s) in all)"
        fix = "copy the folder or quantize the draft again: its files have changed"
        raise CheckpointError(folder, what, fix=fix)


def transcoded(
    recorded: records.Provenance | None,
    recipe: Recipe,
    origin: records.TranscodedFrom,
    *,
    tensor_digests: Mapping[str, str],
    bytes_after: int,
    argv: Sequence[str],
) -> records.QuantizedProvenance | records.TranscodedProvenance:
    """The folder's own record, if it has one, for the codes as `recipe` now stores them."""
    now: dict[str, Any] = {
        "draftquant": package_version("draftquant"),
        "argv": recorded_argv(argv),
        "tensor_digests": tensor_digests,
        "transcoded_from": origin,
    }
    if not isinstance(recorded, records.QuantizedProvenance | records.TranscodedProvenance):
        source = records.SourceFolder(hub_id=origin.hub_id, revision=origin.revision)
        return records.TranscodedProvenance(source=source, **now)
    first = records.MadeBy(draftquant=recorded.draftquant, argv=recorded_argv(recorded.argv))
    now["made_by"] = recorded.made_by or first
    if isinstance(recorded, records.QuantizedProvenance):
        nbytes = dataclasses.replace(recorded.tensor_bytes, after=bytes_after)
        now |= {"recipe": recipe, "recipe_sha256": recipe_sha256(recipe), "tensor_bytes": nbytes}
    return dataclasses.replace(recorded, **now)


def history(record: records.Provenance | None) -> Iterator[records.Provenance]:
    """A record, and the records of earlier folders inside it, the nearest one first."""
    while record is not None:
        yield record
        record = getattr(record, "quantized_by", None)


def quantization_of(record: records.Provenance | None) -> records.QuantizedProvenance | None:
    """How its weights were quantized, where a record of this package says so.

    After cuts it has all of them, and the remaining bytes. Its source has the whole draft's Hub id.
    """
    last = None
    cuts: tuple[records.VocabularyCut, ...] = ()
    for past in history(record):
        if isinstance(past, records.CutProvenance):
            cuts, nbytes = past.cuts, past.tensor_bytes.after
        elif isinstance(past, records.QuantizedProvenance):
            last = past
    if last is None:
        return None
    whole = last.cuts[0].source if last.cuts else last.source
    source = dataclasses.replace(last.source, hub_id=whole.hub_id, revision=whole.revision)
    now = dataclasses.replace(last.tensor_bytes, after=nbytes) if cuts else last.tensor_bytes
    cuts = (*last.cuts, *cuts)
    return dataclasses.replace(last, source=source, cuts=cuts, tensor_bytes=now)


def cuts_of(record: records.Provenance | None) -> tuple[records.VocabularyCut, ...]:
    """Every cut of its vocabulary, the first one first."""
    each = [getattr(past, "cuts", ()) for past in history(record)]
    return tuple(cut for cuts in reversed(each) for cut in cuts)


def sources_of(record: records.Provenance | None) -> Iterator[Mapping[str, str]]:
    """The digests of every folder that it was made from in turn, the nearest one first."""
    for past in history(record):
        if isinstance(past, records.QuantizedProvenance | records.DequantizedProvenance):
            yield past.source.tensor_digests
        yield from (cut.source.tensor_digests for cut in reversed(getattr(past, "cuts", ())))
