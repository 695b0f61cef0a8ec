"""What verbs return, by name; imported when it is asked for, so that no door loads torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...quantize.dequantize import DequantizeReport as DequantizeReport
    from ...quantize.files.stale import CleanReport as CleanReport
    from ...quantize.files.unpickle import Unpickled as Unpickled
    from ...quantize.quantize import QuantizeReport as QuantizeReport
    from ...quantize.transcoding.transcode import TranscodeReport as TranscodeReport
    from ...validate.report.document import Document as Document

_HOMES = {
    "CleanReport": "quantize.files.stale",
    "DequantizeReport": "quantize.dequantize",
    "Document": "validate.report.document",
    "QuantizeReport": "quantize.quantize",
    "TranscodeReport": "quantize.transcoding.transcode",
    "Unpickled": "quantize.files.unpickle",
}
"""Name -> the module that has it, below draftquant."""
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__.partition(".")[0]
    found = getattr(importlib.import_module(f"{package}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
