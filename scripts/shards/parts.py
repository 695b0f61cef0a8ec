"""`Part`: what one machine computes at a time, named by the hash of all that decides about it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...recipes.decode import encode
from ...recipes.errors import DraftQuantError

DIVISIBLE = ("record", "replay", "gate", "compare", "tune")
"""Verbs that ask a division for what they compute."""

_CODE = ("recipes", "quantize", "calibration", "validate")
"""Folders whose modules decide about a result."""


class ShardError(DraftQuantError):
    """A run cannot be divided, or its parts are not what they claim to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some batches of something that is divided. It names no command: equal work is one part.

    Attributes:
        draftquant: version of this package.
        code: hash of its modules that compute.
        inputs: what is read -> its identity.
        batches: positions of prompts, by the batches in which they run together; or of drafts that
            are measured, each a batch of its own.
    """

    draftquant: str
    code: str
    inputs: Mapping[str, str]
    batches: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        """As it is stored: JSON with sorted keys."""
        return f"{json.dumps(encode(self), sort_keys=True)}\n"

    @property
    def address(self) -> str:
        """SHA-256 of `text`, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def positions(self) -> list[int]:
        """Of all its batches."""
        return [position for batch in self.batches for position in batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """Something that can be divided: what one draft proposes, a recording, or measurements.

    Attributes:
        inputs: as of `Part`.
        batches: all of them. A batch is never cut.
        in_order: each part has batches that follow each other; else every N-th, so that each part
            has long ones and short ones.
    """

    inputs: Mapping[str, str]
    batches: Sequence[Sequence[int]]
    in_order: bool

    def parts(self, count: int) -> tuple[Part, ...]:
        """So many parts, or as many as there are batches, if these are fewer."""
        from ...quantize.files.package_version import package_version
        from ...validate.counting.replay_cache import code_sha256

        count = min(count, len(self.batches))
        return tuple(
            Part(
                draftquant=package_version("draftquant"),
                code=code_sha256(_CODE),
                inputs=self.inputs,
                batches=tuple(map(tuple, self._own(i, count))),
            )
            for i in range(count)
        )

    def check(self, parts: Sequence[Part], where: object) -> None:
        """Refuse parts of other work than this, or that are not the whole of it.

        Raises:
            ShardError: code, inputs or batches differ from those that were planned.
        """
        from ...validate.counting.replay_cache import code_sha256

        ours = {"the code of draftquant": code_sha256(_CODE), **self.inputs}
        other: list[str] = []
        for part in parts:
            planned = {"the code of draftquant": part.code, **part.inputs}
            other += [n for n in sorted({*planned, *ours}) if planned.get(n) != ours.get(n)]
        held = sorted(batch for part in parts for batch in part.batches)
        if not other and held != sorted(map(tuple, self.batches)):
            other = ["the batches of prompts"]
        if other:
            raise ShardError(
                where,
                "was planned with other inputs than those of this run:"
                f" {', '.join(dict.fromkeys(other))}",
                fix="run it where the command's paths name what they named when it was planned, or"
                " plan again into a new folder",
            )

    def _own(self, i: int, count: int) -> Sequence[Sequence[int]]:
        if not self.in_order:
            return self.batches[i::count]
        total = len(self.batches)
        return self.batches[i * total // count : (i + 1) * total // count]
