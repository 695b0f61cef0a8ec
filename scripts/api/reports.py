"""What verbs return, by name; imported when it is asked for, so that no door loads torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...quantize.dequantize import DequantizeReport as DequantizeReport
    from ...quantize.engines.contract import EngineCheck as EngineCheck
    from ...quantize.files.stale import CleanReport as CleanReport
    from ...quantize.files.unpickle import Unpickled as Unpickled
    from ...quantize.quantize import QuantizeReport as QuantizeReport
    from ...quantize.transcoding.transcode import TranscodeReport as TranscodeReport
    from ...quantize.verify.folder import VerifyReport as VerifyReport
    from ...validate.counting.draft_replay import DraftReplay as DraftReplay
    from ...validate.judging.judgement import GateReport as GateReport
    from ...validate.judging.retuned_gate import RetunedReport as RetunedReport
    from ...validate.report.document import Document as Document
    from ...validate.served.joint_report import JointReport as JointReport
    from .check import CheckReport as CheckReport
    from .plan import PlanReport as PlanReport
    from .verify import Verification as Verification

_HOMES = {
    "CheckReport": "scripts.api.check",
    "CleanReport": "quantize.files.stale",
    "DequantizeReport": "quantize.dequantize",
    "Document": "validate.report.document",
    "DraftReplay": "validate.counting.draft_replay",
    "EngineCheck": "quantize.engines.contract",
    "GateReport": "validate.judging.judgement",
    "JointReport": "validate.served.joint_report",
    "PlanReport": "scripts.api.plan",
    "QuantizeReport": "quantize.quantize",
    "RetunedReport": "validate.judging.retuned_gate",
    "TranscodeReport": "quantize.transcoding.transcode",
    "Unpickled": "quantize.files.unpickle",
    "Verification": "scripts.api.verify",
    "VerifyReport": "quantize.verify.folder",
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
