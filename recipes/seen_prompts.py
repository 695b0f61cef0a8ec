"""Prompts that were looked at while a draft was made, by hashes and sketches, not by their text.

A prompt is known again by the sha256 of its token ids, and nearly the same prompt by its sketch:
the smallest values of a hash of its shingles (`calibration.traces.shingles` computes them).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_SKETCH = re.compile(r"(?:[0-9a-f]{8}){1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketches:
    """Sketches of prompts.

    Attributes:
        method: how they are computed: another way has another name.
        minima: category -> one sketch for each prompt, ascending: up to 64 values of 32 bits,
            smallest first, as hex digits.
    """

    method: Literal["64 minima of 16-token shingles, 1"] = "64 minima of 16-token shingles, 1"
    minima: Mapping[str, tuple[str, ...]]

    def problem(self) -> str | None:
        """What no sketch says, or None."""
        for sketches in self.minima.values():
            if not all(_SKETCH.fullmatch(sketch) for sketch in sketches):
                return "minima: expected 1 to 64 values of 8 hex digits each"
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
