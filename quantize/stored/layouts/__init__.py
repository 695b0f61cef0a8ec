"""Reading layouts: one object for each, with all that its reading needs.

None of it is shared with `quantize.layouts`, which writes: an error of the one must not hide in the
other.
"""

from collections.abc import Mapping

from .awq import StoredAwq
from .compressed_tensors import StoredCompressedTensors
from .fp8 import StoredFp8
from .modelopt import HF_QUANT_CONFIG, StoredModelOpt
from .quark import StoredQuark
from .reader import Strictness
from .scheme import DeclaredScheme, Part, SideFile, StoredLayout

_ALL: tuple[StoredLayout, ...] = (
    StoredQuark(),
    StoredCompressedTensors(),
    StoredModelOpt(),
    StoredFp8(),
    StoredAwq(),
)
LAYOUTS: Mapping[str, StoredLayout] = {each.name: each for each in _ALL}
"""By quant_method, which is the name of the layout."""

__all__ = [
    "HF_QUANT_CONFIG",
    "LAYOUTS",
    "DeclaredScheme",
    "Part",
    "SideFile",
    "StoredLayout",
    "Strictness",
]
