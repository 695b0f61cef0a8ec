"""What earlier versions recorded in draftquant.json, and this one does not read."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import CheckpointError

_LEFT: Mapping[str, str] = {
    "repairs": "that config.json was repaired",
}
"""Key of a record -> what it says where it stands there and is not empty."""


def check_still_read(path: Path, content: Mapping[str, object]) -> None:
    """A draftquant.json, and those of the folders before it, hold only what is still read.

    Raises:
        CheckpointError: one records what only version 0.2.0 reads.
    """
    for record in _records(content):
        for key, what in _LEFT.items():
            if record.get(key):
                raise CheckpointError(
                    path,
                    f"{key}: the folder records {what}, which draftquant 0.2.0 was the last to"
                    " read",
                    fix="use draftquant 0.2.0 with this folder, or quantize the draft again",
                )


def _records(content: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The record, and the one of the folder that it was made from, if there is one."""
    yield content
    before = content.get("quantized_by")
    if isinstance(before, Mapping):
        yield from _records(before)
