"""Numbers of layers in names, where the number of the target's layers is not known."""

import re

from .contract import UNKNOWN_FIRST_LAYER

_NUMBER = re.compile(rf"\blayers\.({UNKNOWN_FIRST_LAYER // 100}\d\d)\b")


def shown(text: str) -> str:
    """A text in which layers whose number is not known are N, N+1 and so on."""

    def name(match: re.Match[str]) -> str:
        layer = int(match[1]) - UNKNOWN_FIRST_LAYER
        return f"layers.N+{layer}" if layer else "layers.N"

    return _NUMBER.sub(name, text)
