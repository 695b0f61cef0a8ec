"""Which module reads which layout."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from . import angelslim, modelopt, specforge, speculators, torchspec, vllm
from .dump_formats import DumpFormat
from .sample import Pending

READERS: Mapping[DumpFormat, Callable[[Path], Sequence[Pending]]] = MappingProxyType(
    {
        "specforge": specforge.samples,
        "torchspec": torchspec.samples,
        "speculators": speculators.samples,
        "modelopt": modelopt.samples,
        "angelslim": angelslim.samples,
        "vllm": vllm.samples,
    }
)
"""Dump folder -> its samples, unread, in the order of their numbers."""
