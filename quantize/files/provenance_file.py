"""draftquant.json: read strictly, sealed, and held against the folder that it lies in."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ...recipes.decode import encode
from ...recipes.errors import CheckpointError, reason
from ...recipes.regular_file import check_own, read_text
from ...recipes.schema import Recipe, recipe_sha256
from ...recipes.strict_json import JsonProblem, decode, parse_object
from .checkpoint import PROVENANCE_FILE
from .hub import recorded_argv
from .package_version import package_version
from .provenance import (
    CutProvenance,
    DequantizedProvenance,
    GraftedProvenance,
    MadeBy,
    Provenance,
    QuantizedProvenance,
    SourceFolder,
    TensorBytes,
    TranscodedFrom,
    TranscodedProvenance,
    VocabularyCut,
)

_LEFT = (
    ("repairs", None, "that config.json was repaired"),
    ("format", "draftquant-tuned", "that it was fine-tuned (retune)"),
    ("recipe.algorithm.rounding", "retuned", "that it was fine-tuned (retune)"),
    ("recipe.chosen_on", None, "a search for its recipe (tune)"),
)
"""Dotted key of a record, its value (None = any that is not empty), and what it says there."""


def check_still_read(path: Path, content: Mapping[str, object]) -> None:
    """Refuse a draftquant.json where it, or one inside it, records what only 0.2.0 reads."""
    for record in _records(content):
        for key, value, what in _LEFT:
            found = _at(record, key)
            if found and value in (None, found):
                raise CheckpointError(
                    path,
                    f"{key}: the folder records {what}, which draftquant 0.2.0 was the last to"
                    " read",
                    fix="use draftquant 0.2.0 with this folder, or quantize the draft again",
                )


def _at(record: Mapping[str, object], dotted: str) -> object:
    found: object = record
    for key in dotted.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _records(content: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The record, and the one of the folder that it was made from, if there is one."""
    yield content
    before = content.get("quantized_by")
    if isinstance(before, Mapping):
        yield from _records(before)


ProvenanceT = TypeVar("ProvenanceT", bound=Provenance)


def read_provenance(folder: Path) -> Provenance | None:
    """The draftquant.json of a folder, every key understood; None where it has none."""
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
    """Refuse the draftquant.json of a folder, if it has one, that was edited since."""
    if provenance is not None and provenance.sha256 != sealed(provenance).sha256:
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            f"sha256: not that of the other keys: {provenance.sha256!r}",
            fix="copy the folder or quantize the draft again: this record was edited",
        )


def check_recorded(folder: Path, recorded: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuse tensors whose digests are not those that the folder's draftquant.json records."""
    changed = [name for name in sorted(found) if recorded.get(name) != found[name]]
    if changed:
        raise CheckpointError(
            folder,
            f"{changed[0]}: not the bytes whose digest was recorded when it was quantized"
            f" ({len(changed)} tensor(s) in all)",
            fix="copy the folder or quantize the draft again: its files have changed",
        )


RecordT = TypeVar("RecordT", QuantizedProvenance, TranscodedProvenance)


def transcoded(
    recorded: Provenance | None,
    recipe: Recipe,
    origin: TranscodedFrom,
    *,
    tensor_digests: Mapping[str, str],
    bytes_after: int,
    argv: Sequence[str],
) -> QuantizedProvenance | TranscodedProvenance:
    """What a folder recorded of itself, if it did, now written as `recipe` stores it."""
    if isinstance(recorded, QuantizedProvenance):
        return dataclasses.replace(
            _by_this_run(recorded, argv),
            recipe=recipe,
            recipe_sha256=recipe_sha256(recipe),
            tensor_digests=tensor_digests,
            tensor_sha256={},
            tensor_bytes=dataclasses.replace(recorded.tensor_bytes, after=bytes_after),
            transcoded_from=origin,
        )
    if isinstance(recorded, TranscodedProvenance):
        return dataclasses.replace(
            _by_this_run(recorded, argv),
            tensor_digests=tensor_digests,
            tensor_sha256={},
            transcoded_from=origin,
        )
    return TranscodedProvenance(
        draftquant=package_version("draftquant"),
        argv=recorded_argv(argv),
        source=SourceFolder(hub_id=origin.hub_id, revision=origin.revision),
        repairs=(),
        tensor_digests=tensor_digests,
        transcoded_from=origin,
    )


def _by_this_run(recorded: RecordT, argv: Sequence[str]) -> RecordT:
    """The record as this command line goes on with it; the first one stays in `made_by`."""
    first = MadeBy(draftquant=recorded.draftquant, argv=recorded_argv(recorded.argv))
    return dataclasses.replace(
        recorded,
        draftquant=package_version("draftquant"),
        argv=recorded_argv(argv),
        made_by=recorded.made_by or first,
    )


def quantization_of(record: Provenance | None) -> QuantizedProvenance | None:
    """How its weights were quantized, where a record of this package says so.

    After cuts it has all of them and the bytes left. Its source has the whole draft's Hub id.
    """
    if isinstance(record, DequantizedProvenance | GraftedProvenance):
        return quantization_of(record.quantized_by)
    if isinstance(record, QuantizedProvenance):
        whole = record.cuts[0].source if record.cuts else record.source
        source = dataclasses.replace(record.source, hub_id=whole.hub_id, revision=whole.revision)
        return dataclasses.replace(record, source=source)
    if not isinstance(record, CutProvenance):
        return None
    before = quantization_of(record.quantized_by)
    if before is None:
        return None
    nbytes = TensorBytes(before=before.tensor_bytes.before, after=record.tensor_bytes.after)
    return dataclasses.replace(before, tensor_bytes=nbytes, cuts=(*before.cuts, *record.cuts))


def cuts_of(record: Provenance | None) -> tuple[VocabularyCut, ...]:
    """Every cut of its vocabulary, the first one first."""
    if isinstance(record, DequantizedProvenance | GraftedProvenance):
        return cuts_of(record.quantized_by)
    if isinstance(record, CutProvenance):
        return (*cuts_of(record.quantized_by), *record.cuts)
    return record.cuts if isinstance(record, QuantizedProvenance) else ()


def sources_of(record: Provenance | None) -> Iterator[Mapping[str, str]]:
    """The digests of every folder that it was made of in turn, the nearest one first."""
    if isinstance(record, DequantizedProvenance):
        yield record.source.digests
        yield from sources_of(record.quantized_by)
    elif isinstance(record, GraftedProvenance):
        yield from sources_of(record.quantized_by)
    elif isinstance(record, CutProvenance):
        yield from (cut.source.digests for cut in reversed(record.cuts))
        yield from sources_of(record.quantized_by)
    elif isinstance(record, QuantizedProvenance):
        yield record.source.digests
        yield from (cut.source.digests for cut in reversed(record.cuts))
