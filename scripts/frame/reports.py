"""What verbs return, by name; imported on first use, so that no entry point loads torch."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from ...calibration.dumps.import_dump import ImportReport as ImportReport
    from ...calibration.traces.sets import MergeReport as MergeReport
    from ...calibration.traces.sets import SplitReport as SplitReport
    from ...calibration.traces.sets import StoreReport as StoreReport
    from ...calibration.traces.trace_folder import TraceFolder as TraceFolder
    from ...calibration.traces.trace_info import TraceInfo as TraceInfo
    from ...quantize.asking.asked_check import AskedCheck as AskedCheck
    from ...quantize.engines.contract import EngineCheck as EngineCheck
    from ...quantize.estimate.estimate_report import EstimateReport as EstimateReport
    from ...quantize.files.staging import CleanReport as CleanReport
    from ...quantize.grafting.graft_layer import GraftReport as GraftReport
    from ...quantize.inspection import Inspection as Inspection
    from ...quantize.inspection import PlanReport as PlanReport
    from ...quantize.listed_recipes import ListedRecipe as ListedRecipe
    from ...quantize.making.dequantize_draft import DequantizeReport as DequantizeReport
    from ...quantize.making.quantize_draft import QuantizeReport as QuantizeReport
    from ...quantize.making.transcode_draft import TranscodeReport as TranscodeReport
    from ...quantize.making.unpickle_draft import Unpickled as Unpickled
    from ...quantize.pairing.pair_check import CheckReport as CheckReport
    from ...quantize.verify.comparison import VerifyReport as VerifyReport
    from ...quantize.verify.verification import Verification as Verification
    from ...validate.comparison.draft_comparison import ComparisonReport as ComparisonReport
    from ...validate.comparison.size_estimate import VocabReport as VocabReport
    from ...validate.counting.draft_counts import DraftReplay as DraftReplay
    from ...validate.judging.judgement import GateReport as GateReport
    from ...validate.measure.measurement import Measurement as Measurement
    from ...validate.parity.finding import Findings as Findings
    from ...validate.parity.task_samples import TaskSamples as TaskSamples
    from ...validate.report.document import Document as Document
    from ...validate.runs.auto_run import ChosenReport as ChosenReport
    from ...validate.runs.golden_run import GoldenText as GoldenText
    from ...validate.runs.report_pages import WrittenReport as WrittenReport
    from ...validate.served.joint_report import JointReport as JointReport

__all__, __getattr__ = lazy_names(__name__)
