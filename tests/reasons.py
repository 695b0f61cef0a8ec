"""The engine's own text in a reason of `check`, which a plain sentence explains."""

import re

_IN_BRACKETS = re.compile(r" \[(\w*(?:Error|Exception)\b.*)\]$", re.DOTALL)


def own_text(reason: str | None) -> str:
    """The text in brackets at the end; the reason itself where there is none."""
    found = _IN_BRACKETS.search(reason or "")
    return found[1] if found else reason or ""
