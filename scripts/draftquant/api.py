"""Every verb as a function, and the types that they take and return.

    from draftquant import api as dq

    dq.quantize("DRAFT", "fp8-ptpc", "OUT")
    assert dq.verify("OUT", against="DRAFT").ok
    print(dq.gate("DRAFT", "OUT", "TRACES").verdict)

Each function is what the command of its name runs, and returns what that prints. torch is loaded by
the run that needs it.
"""

from typing import TYPE_CHECKING, Any

from .recipes import Recipe
from .recipes.errors import DraftQuantError, DraftQuantWarning
from .scripts.api import reports
from .scripts.api.dequantize import dequantize
from .scripts.api.quantize import quantize
from .scripts.api.transcode import transcode
from .scripts.api.watch import Bar, Watch

if TYPE_CHECKING:
    from .scripts.api.reports import DequantizeReport, QuantizeReport, TranscodeReport

__all__ = [
    "Bar",
    "DequantizeReport",
    "DraftQuantError",
    "DraftQuantWarning",
    "QuantizeReport",
    "Recipe",
    "TranscodeReport",
    "Watch",
    "dequantize",
    "quantize",
    "transcode",
]


def __getattr__(name: str) -> Any:
    """A type that a verb returns."""
    return getattr(reports, name)
