"""A target's folder as two parts: what is the target's own, and its MTP layer with its tables."""

import re
from pathlib import Path

from torch import Tensor
from verdict import read_tensors

_FIRST_OF_LAYER = re.compile(
    r"(model\.layers\.\d+|model\.mtp_layers\.\d+|mtp)\.(eh_proj|input_proj|fc)\.weight"
)
_TABLES = re.compile(r"(embed_tokens|shared_head\.head)\.weight$")

HEAD = re.compile(r"shared_head\.head")
"""Of a layer: its parameters are filled with the target's head (`glm4_moe_mtp.py`)."""


def parts_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Tensors of "target" and of "layer", of which the tables are the target's."""
    tensors = read_tensors(folder)
    starts = tuple(f"{m[1]}." for name in tensors if (m := _FIRST_OF_LAYER.fullmatch(name)))
    layer = {name: value for name, value in tensors.items() if name.startswith(starts)}
    own = {name: value for name, value in tensors.items() if name not in layer}
    return {
        "target": own,
        "layer": {name: value for name, value in layer.items() if not _TABLES.search(name)},
    }
