"""Prompts that are too long for the target: what becomes of them, and what trace.json says."""

from dataclasses import dataclass
from typing import Literal

TooLong = Literal["error", "skip", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLongPrompts:
    """Prompts that the target had too few positions for, by id.

    Attributes:
        skipped: they were not recorded. truncated: their last tokens were.
    """

    skipped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
