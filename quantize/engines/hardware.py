"""GPUs by the names that people say, and the architectures that engines ask for."""

import difflib
from collections.abc import Mapping

from ..errors import CheckpointError

GPUS: Mapping[str, str] = {
    "mi300x": "gfx942",
    "mi325x": "gfx942",
    "mi350x": "gfx950",
    "mi355x": "gfx950",
    "a100": "sm80",
    "l40s": "sm89",
    "h100": "sm90",
    "h200": "sm90",
    "gh200": "sm90",
    "b200": "sm100",
    "gb200": "sm100",
}
"""Product -> architecture. Source: AMD ROCm and NVIDIA CUDA tables of GPUs."""


def gpus_of(arch: str) -> str:
    """The products of an architecture as people say them, or its own name."""
    return ", ".join(name.upper() for name, each in GPUS.items() if each == arch) or arch


def architecture(name: str) -> str:
    """The architecture that a GPU or an architecture is named by, in any case of letters.

    Raises:
        CheckpointError: nobody calls a GPU so.
    """
    known = name.lower().replace("-", "").replace(" ", "")
    if known in GPUS:
        return GPUS[known]
    if known in GPUS.values():
        return known
    names = [*GPUS, *dict.fromkeys(GPUS.values())]
    close = difflib.get_close_matches(known, names, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"use one of: {', '.join(names)}"
    raise CheckpointError("--arch", f"no GPU is called {name!r}", fix=hint)
