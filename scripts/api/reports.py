"""What verbs return, by name; imported when it is asked for, so that no door loads torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...calibration.dumps.import_findings import ImportReport as ImportReport
    from ...calibration.rounding.retune_draft import RetuneReport as RetuneReport
    from ...calibration.traces.info import TraceInfo as TraceInfo
    from ...calibration.traces.sets import MergeReport as MergeReport
    from ...calibration.traces.sets import SplitReport as SplitReport
    from ...quantize.dequantize import DequantizeReport as DequantizeReport
    from ...quantize.files.stale import CleanReport as CleanReport
    from ...quantize.files.unpickle import Unpickled as Unpickled
    from ...quantize.quantize import QuantizeReport as QuantizeReport
    from ...quantize.transcoding.transcode import TranscodeReport as TranscodeReport
    from ...validate.comparison.draft_comparison import ComparisonReport as ComparisonReport
    from ...validate.launch.speed import SpeedReport as SpeedReport
    from ...validate.measure.measurement import Measurement as Measurement
    from ...validate.parity.finding import Findings as Findings
    from ...validate.parity.lm_eval_samples import TaskSamples as TaskSamples
    from ...validate.report.document import Document as Document
    from ...validate.served.reconciliation import Reconciliation as Reconciliation
    from ...validate.tuning.tune_draft import TuneReport as TuneReport

_HOMES = {
    "CleanReport": "quantize.files.stale",
    "ComparisonReport": "validate.comparison.draft_comparison",
    "DequantizeReport": "quantize.dequantize",
    "Document": "validate.report.document",
    "Findings": "validate.parity.finding",
    "ImportReport": "calibration.dumps.import_findings",
    "Measurement": "validate.measure.measurement",
    "MergeReport": "calibration.traces.sets",
    "QuantizeReport": "quantize.quantize",
    "Reconciliation": "validate.served.reconciliation",
    "RetuneReport": "calibration.rounding.retune_draft",
    "SpeedReport": "validate.launch.speed",
    "SplitReport": "calibration.traces.sets",
    "TaskSamples": "validate.parity.lm_eval_samples",
    "TraceInfo": "calibration.traces.info",
    "TranscodeReport": "quantize.transcoding.transcode",
    "TuneReport": "validate.tuning.tune_draft",
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
