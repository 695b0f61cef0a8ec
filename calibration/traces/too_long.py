"""What trace.json says of prompts that were too long for the target."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLongPrompts:
    """Prompts that the target had too few positions for, by id.

    Attributes:
        skipped: they were not recorded. truncated: their last tokens were.
    """

    skipped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
