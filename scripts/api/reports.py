"""What verbs return, by name; imported when it is asked for, so that no door loads torch."""

from typing import TYPE_CHECKING

from ...recipes.lazy_names import lazy_names

if TYPE_CHECKING:
    from ...calibration.dumps.import_findings import ImportReport as ImportReport
    from ...calibration.traces.info import TraceInfo as TraceInfo
    from ...calibration.traces.sets import MergeReport as MergeReport
    from ...calibration.traces.sets import SplitReport as SplitReport
    from ...calibration.traces.store_traces import StoreReport as StoreReport
    from ...calibration.traces.trace_folder import TraceFolder as TraceFolder
    from ...quantize.dequantize_draft import DequantizeReport as DequantizeReport
    from ...quantize.engines.contract import EngineCheck as EngineCheck
    from ...quantize.estimate.estimate_report import EstimateReport as EstimateReport
    from ...quantize.files.staging_names import CleanReport as CleanReport
    from ...quantize.files.unpickle_draft import Unpickled as Unpickled
    from ...quantize.grafting.graft_layer import GraftReport as GraftReport
    from ...quantize.quantize_draft import QuantizeReport as QuantizeReport
    from ...quantize.transcoding.transcode_report import TranscodeReport as TranscodeReport
    from ...quantize.verify.folder_verification import VerifyReport as VerifyReport
    from ...validate.comparison.draft_comparison import ComparisonReport as ComparisonReport
    from ...validate.counting.draft_replay import DraftReplay as DraftReplay
    from ...validate.judging.judgement import GateReport as GateReport
    from ...validate.measure.measurement import Measurement as Measurement
    from ...validate.parity.finding import Findings as Findings
    from ...validate.parity.lm_eval_samples import TaskSamples as TaskSamples
    from ...validate.report.document import Document as Document
    from ...validate.served.joint_report import JointReport as JointReport
    from ...validate.vocabulary.vocab_report import VocabReport as VocabReport
    from .check import CheckReport as CheckReport
    from .golden import GoldenText as GoldenText
    from .inspect import Inspection as Inspection
    from .plan import PlanReport as PlanReport
    from .recipes import ListedRecipe as ListedRecipe
    from .report import WrittenReport as WrittenReport
    from .verify import Verification as Verification

_HOMES = {
    "CheckReport": "scripts.api.check",
    "CleanReport": "quantize.files.staging_names",
    "ComparisonReport": "validate.comparison.draft_comparison",
    "DequantizeReport": "quantize.dequantize_draft",
    "Document": "validate.report.document",
    "DraftReplay": "validate.counting.draft_replay",
    "EngineCheck": "quantize.engines.contract",
    "EstimateReport": "quantize.estimate.estimate_report",
    "Findings": "validate.parity.finding",
    "GateReport": "validate.judging.judgement",
    "GoldenText": "scripts.api.golden",
    "GraftReport": "quantize.grafting.graft_layer",
    "ImportReport": "calibration.dumps.import_findings",
    "Inspection": "scripts.api.inspect",
    "JointReport": "validate.served.joint_report",
    "ListedRecipe": "scripts.api.recipes",
    "Measurement": "validate.measure.measurement",
    "MergeReport": "calibration.traces.sets",
    "PlanReport": "scripts.api.plan",
    "QuantizeReport": "quantize.quantize_draft",
    "SplitReport": "calibration.traces.sets",
    "TaskSamples": "validate.parity.lm_eval_samples",
    "TraceFolder": "calibration.traces.trace_folder",
    "StoreReport": "calibration.traces.store_traces",
    "TraceInfo": "calibration.traces.info",
    "TranscodeReport": "quantize.transcoding.transcode_report",
    "Unpickled": "quantize.files.unpickle_draft",
    "Verification": "scripts.api.verify",
    "VerifyReport": "quantize.verify.folder_verification",
    "VocabReport": "validate.vocabulary.vocab_report",
    "WrittenReport": "scripts.api.report",
}
"""Name -> the module that has it, below draftquant."""
_PACKAGE = __name__.partition(".")[0]
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, {n: f"{_PACKAGE}.{home}" for n, home in _HOMES.items()})
