"""`Repair`: one thing of a folder's JSON that was wrong, and what is written instead."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...drafts import Draft, read_draft
from ...files.checkpoint import Checkpoint
from ...stored.draft import plain_headers
from ...stored.parts import quantized_looking


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the tensors of a folder are, whatever it declares.

    Attributes:
        draft: of plain weights that the folder stands for; dtype and byte range of the rows of
            quantized linears mean nothing.
        modules: on-disk names of the modules that are stored as codes.
    """

    draft: Draft
    modules: frozenset[str]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Stored":
        """Read headers and config.json, except what it declares.

        Raises:
            CheckpointError: apart from its quantized linears, the folder is not a draft.
        """
        modules = frozenset(quantized_looking(checkpoint.tensors.values()))
        return cls(draft=read_draft(plain_headers(checkpoint, modules)), modules=modules)

    @property
    def canonical(self) -> frozenset[str]:
        """The canonical names of `modules`."""
        return frozenset(self.draft.family.canonical_name(module) for module in self.modules)


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The folder with another config.json."""
    return dataclasses.replace(checkpoint, config=config)


def with_declaration(checkpoint: Checkpoint, declared: Mapping[str, Any]) -> Checkpoint:
    """The folder with another `quantization_config`."""
    return with_config(checkpoint, {**checkpoint.config, "quantization_config": declared})
