"""Numbers of a draft's layers, which engines count on from the target's."""

import re

UNKNOWN_FIRST_LAYER = 10**6
"""Stands for the number of the target's layers in names, where it is not known."""
_NUMBER = re.compile(rf"\blayers\.({UNKNOWN_FIRST_LAYER // 100}\d\d)\b")


def shown(text: str) -> str:
    """A text in which layers whose number is not known are N, N+1 and so on."""

    def name(match: re.Match[str]) -> str:
        layer = int(match[1]) - UNKNOWN_FIRST_LAYER
        return f"layers.N+{layer}" if layer else "layers.N"

    return _NUMBER.sub(name, text)
