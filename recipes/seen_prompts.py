"""Prompts that were looked at while a draft was made, by hashes and sketches, not by their text.

A prompt is known again by the sha256 of its token ids, and nearly the same prompt by its sketch and
that of its continuation: the smallest values of a hash of their shingles
(`calibration.traces.shingles` computes them).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_SKETCH = re.compile(r"(?:[0-9a-f]{8}){1,64}")
SketchMethod = Literal[
    "64 minima of 16-token shingles, 1",
    "64 minima of 4-token shingles, of 16-token ones of continuations, 2",
]
"""The first, of earlier versions, has none of continuations."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketches:
    """Sketches of prompts and of their continuations.

    Attributes:
        method: how they are computed: another way has another name.
        minima: category -> one sketch for each prompt, ascending: up to 64 values of 32 bits,
            smallest first, as hex digits.
        continuations: the same of what the target wrote, where that is long enough.
    """

    method: SketchMethod
    minima: Mapping[str, tuple[str, ...]]
    continuations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def problem(self) -> str | None:
        """What no sketch says, or None."""
        for name, of in (("minima", self.minima), ("continuations", self.continuations)):
            if not all(_SKETCH.fullmatch(one) for sketches in of.values() for one in sketches):
                return f"{name}: expected 1 to 64 values of 8 hex digits each"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPrompts:
    """Prompts that were looked at.

    Attributes:
        sha256: of the token ids of each and of the first turn of its conversation, ascending.
        sketches: of each; None where there are none.
    """

    sha256: tuple[str, ...] = ()
    sketches: Sketches | None = None

    def problem(self) -> str | None:
        """What no prompt has, or None."""
        if not all(_SHA256.fullmatch(digest) for digest in self.sha256):
            return "sha256: expected 64 hex digits each"
        return None


NO_PROMPTS = SeenPrompts()
