"""The layouts of dumps that are known, by the name of who writes them."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .sample import Pending

DumpFormat = Literal["specforge", "torchspec", "speculators", "modelopt", "angelslim", "vllm"]
"""Which module beside this one reads which layout."""


def samples_of(dump: Path, layout: DumpFormat) -> "Sequence[Pending]":
    """The samples of a dump folder, unread, in the order of their numbers."""
    found: Sequence[Pending] = importlib.import_module(f".{layout}", __package__).samples(dump)
    return found
