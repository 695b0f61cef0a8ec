"""`Repair`: one thing of a folder's JSON that was wrong, and what is written instead."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...files.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One change.

    Attributes:
        name: what is repaired, in lower case with hyphens.
        wrong: what was wrong, and who minds. written: what stands there now.
    """

    name: str
    wrong: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one kind of repair came to.

    Attributes:
        checkpoint: the folder with its config.json as it is to be; the folder itself is untouched.
        repairs: none where nothing of this kind is wrong.
        notes: what is wrong, or not proven, and not repaired.
        files: other JSON files to write, by name.
    """

    checkpoint: Checkpoint
    repairs: tuple[Repair, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, Any] = field(default_factory=dict)


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The folder with another config.json."""
    return dataclasses.replace(checkpoint, config=config)


def with_declaration(checkpoint: Checkpoint, declared: Mapping[str, Any]) -> Checkpoint:
    """The folder with another `quantization_config`."""
    return with_config(checkpoint, {**checkpoint.config, "quantization_config": declared})
