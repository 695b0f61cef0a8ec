"""What may name a prompt, a category or an engine in trace.json and beside it."""

from typing import TypeGuard

LONGEST_NAME = 200


def is_printable_name(value: object) -> TypeGuard[str]:
    """True for text of 1 to 200 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()
