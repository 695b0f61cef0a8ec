"""What verbs return, by name; imported when it is asked for, so that no door loads torch."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from ...calibration.dumps.import_dump import ImportReport as ImportReport
    from ...calibration.traces.sets import MergeReport as MergeReport
    from ...calibration.traces.sets import SplitReport as SplitReport
    from ...calibration.traces.sets import StoreReport as StoreReport
    from ...calibration.traces.trace_folder import TraceFolder as TraceFolder
    from ...calibration.traces.trace_info import TraceInfo as TraceInfo
    from ...quantize.converting.dequantize_draft import DequantizeReport as DequantizeReport
    from ...quantize.converting.transcode_draft import TranscodeReport as TranscodeReport
    from ...quantize.engines.contract import EngineCheck as EngineCheck
    from ...quantize.engines.listed_recipes import ListedRecipe as ListedRecipe
    from ...quantize.estimate.estimate_report import EstimateReport as EstimateReport
    from ...quantize.files.staging import CleanReport as CleanReport
    from ...quantize.grafting.graft_layer import GraftReport as GraftReport
    from ...quantize.inspection import Inspection as Inspection
    from ...quantize.inspection import PlanReport as PlanReport
    from ...quantize.making.quantize_draft import QuantizeReport as QuantizeReport
    from ...quantize.making.unpickle_draft import Unpickled as Unpickled
    from ...quantize.pairing.check_report import CheckReport as CheckReport
    from ...quantize.verify.comparison import VerifyReport as VerifyReport
    from ...quantize.verify.verification import Verification as Verification
    from ...validate.comparison.draft_comparison import ComparisonReport as ComparisonReport
    from ...validate.comparison.size_estimate import VocabReport as VocabReport
    from ...validate.counting.draft_counts import DraftReplay as DraftReplay
    from ...validate.judging.judgement import GateReport as GateReport
    from ...validate.measure.measurement import Measurement as Measurement
    from ...validate.parity.finding import Findings as Findings
    from ...validate.parity.lm_eval_tasks import TaskSamples as TaskSamples
    from ...validate.report.document import Document as Document
    from ...validate.runs.golden_run import GoldenText as GoldenText
    from ...validate.runs.report_pages import WrittenReport as WrittenReport
    from ...validate.served.joint_report import JointReport as JointReport

_HOMES = {
    "CheckReport": "quantize.pairing.check_report",
    "CleanReport": "quantize.files.staging",
    "ComparisonReport": "validate.comparison.draft_comparison",
    "DequantizeReport": "quantize.converting.dequantize_draft",
    "Document": "validate.report.document",
    "DraftReplay": "validate.counting.draft_counts",
    "EngineCheck": "quantize.engines.contract",
    "EstimateReport": "quantize.estimate.estimate_report",
    "Findings": "validate.parity.finding",
    "GateReport": "validate.judging.judgement",
    "GoldenText": "validate.runs.golden_run",
    "GraftReport": "quantize.grafting.graft_layer",
    "ImportReport": "calibration.dumps.import_dump",
    "Inspection": "quantize.inspection",
    "JointReport": "validate.served.joint_report",
    "ListedRecipe": "quantize.engines.listed_recipes",
    "Measurement": "validate.measure.measurement",
    "MergeReport": "calibration.traces.sets",
    "PlanReport": "quantize.inspection",
    "QuantizeReport": "quantize.making.quantize_draft",
    "SplitReport": "calibration.traces.sets",
    "TaskSamples": "validate.parity.lm_eval_tasks",
    "TraceFolder": "calibration.traces.trace_folder",
    "StoreReport": "calibration.traces.sets",
    "TraceInfo": "calibration.traces.trace_info",
    "TranscodeReport": "quantize.converting.transcode_draft",
    "Unpickled": "quantize.making.unpickle_draft",
    "Verification": "quantize.verify.verification",
    "VerifyReport": "quantize.verify.comparison",
    "VocabReport": "validate.comparison.size_estimate",
    "WrittenReport": "validate.runs.report_pages",
}
"""Name -> the module that has it, below draftquant."""
_PACKAGE = __name__.partition(".")[0]
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, {n: f"{_PACKAGE}.{home}" for n, home in _HOMES.items()})
