"""What earlier versions recorded in draftquant.json, and this one does not read."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import CheckpointError

_LEFT = (
    ("repairs", None, "that config.json was repaired"),
    ("format", "draftquant-tuned", "that it was fine-tuned (retune)"),
    ("recipe.algorithm.rounding", "retuned", "that it was fine-tuned (retune)"),
    ("recipe.chosen_on", None, "a search for its recipe (tune)"),
)
"""Dotted key of a record, its value (None = any that is not empty), and what it says there."""


def check_still_read(path: Path, content: Mapping[str, object]) -> None:
    """A draftquant.json, and those of the folders before it, hold only what is still read.

    Raises:
        CheckpointError: one records what only version 0.2.0 reads.
    """
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
