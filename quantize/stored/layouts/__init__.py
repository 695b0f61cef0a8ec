"""Layouts that are read: one object per layout, with everything that reading it needs.

A declaration is written once, here, and literal JSON in the tests holds it.
"""

from collections.abc import Mapping

from .integer_layouts import StoredAutoRound, StoredAwq, StoredGptq
from .scheme import StoredLayout
from .stored_compressed_tensors import StoredCompressedTensors
from .stored_modelopt import HF_QUANT_CONFIG, StoredFp8, StoredModelOpt
from .stored_quark import StoredQuark

_ALL: tuple[StoredLayout, ...] = (
    StoredQuark(),
    StoredCompressedTensors(),
    StoredModelOpt(),
    StoredFp8(),
    StoredAwq(),
)
LAYOUTS: Mapping[str, StoredLayout] = {each.name: each for each in _ALL}
"""By quant_method, which is the name of the layout: those that this package writes too."""
READ_LAYOUTS: Mapping[str, StoredLayout] = {
    **LAYOUTS,
    "gptq": StoredGptq(),
    "auto-round": StoredAutoRound(),
    "awq_marlin": LAYOUTS["awq"],
    "gptq_marlin": StoredGptq(),
    "modelopt_fp4": LAYOUTS["modelopt"],
}
"""By quant_method: all that are read."""

__all__ = ["HF_QUANT_CONFIG", "LAYOUTS", "READ_LAYOUTS"]
