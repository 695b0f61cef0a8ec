"""What a later run makes of a record: the same codes in another layout."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ...recipes.schema import Recipe, recipe_sha256
from .command_line import recorded_argv
from .package_version import package_version
from .provenance import MadeBy, Provenance, QuantizedProvenance, TranscodedProvenance
from .provenance_sources import SourceFolder, TranscodedFrom

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
    """What a folder recorded of itself, its codes now written as `recipe` stores them.

    Args:
        recorded: of the folder whose codes these are; None where it has none.
    """
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
