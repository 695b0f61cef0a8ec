"""The layouts of dumps that are known, by the name of who writes them."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .samples import Pending

DumpFormat = Literal["specforge", "torchspec", "speculators", "modelopt", "angelslim", "vllm"]
"""Those of `torch_dumps`, and one module beside this one for each other."""


def samples_of(dump: Path, layout: DumpFormat) -> "Sequence[Pending]":
    """The samples of a dump folder, unread, in the order of their numbers."""
    from . import torch_dumps

    if layout in torch_dumps.LAYOUTS:
        return torch_dumps.samples(dump, layout)
    found: Sequence[Pending] = importlib.import_module(f".{layout}", __package__).samples(dump)
    return found
