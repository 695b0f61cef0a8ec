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
from .recipes.listener import Bar, Listener
from .scripts.frame import reports
from .scripts.frame.listener import ProgressListener
from .scripts.frame.verb import explain
from .scripts.parity_sampled import parity_sampled
from .scripts.verbs.card import card
from .scripts.verbs.check import check
from .scripts.verbs.clean import clean
from .scripts.verbs.compare import compare
from .scripts.verbs.completion import completion
from .scripts.verbs.dequantize import dequantize
from .scripts.verbs.estimate import estimate
from .scripts.verbs.gate import gate
from .scripts.verbs.golden import golden
from .scripts.verbs.graft import graft
from .scripts.verbs.inspect import inspect
from .scripts.verbs.measure import measure
from .scripts.verbs.parity import parity_divergence, parity_draft, parity_run_tasks, parity_tasks
from .scripts.verbs.plan import plan
from .scripts.verbs.quantize import quantize
from .scripts.verbs.recipes import recipes_check, recipes_list, recipes_show
from .scripts.verbs.record import record
from .scripts.verbs.replay import replay
from .scripts.verbs.report import report
from .scripts.verbs.traces import (
    traces_import,
    traces_info,
    traces_merge,
    traces_split,
    traces_store,
)
from .scripts.verbs.transcode import transcode
from .scripts.verbs.unpickle import unpickle
from .scripts.verbs.verify import verify
from .scripts.verbs.vocab import vocab

if TYPE_CHECKING:
    from .scripts.frame.reports import (
        CheckReport,
        CleanReport,
        ComparisonReport,
        DequantizeReport,
        Document,
        DraftReplay,
        EngineCheck,
        EstimateReport,
        Findings,
        GateReport,
        GoldenText,
        GraftReport,
        ImportReport,
        Inspection,
        JointReport,
        ListedRecipe,
        Measurement,
        MergeReport,
        PlanReport,
        QuantizeReport,
        SplitReport,
        StoreReport,
        TaskSamples,
        TraceFolder,
        TraceInfo,
        TranscodeReport,
        Unpickled,
        Verification,
        VerifyReport,
        VocabReport,
        WrittenReport,
    )

VERBS = (
    "card",
    "check",
    "clean",
    "compare",
    "completion",
    "dequantize",
    "estimate",
    "gate",
    "golden",
    "graft",
    "inspect",
    "measure",
    "parity_divergence",
    "parity_draft",
    "parity_run_tasks",
    "parity_sampled",
    "parity_tasks",
    "plan",
    "quantize",
    "recipes_check",
    "recipes_list",
    "recipes_show",
    "record",
    "replay",
    "report",
    "traces_import",
    "traces_info",
    "traces_merge",
    "traces_split",
    "traces_store",
    "transcode",
    "unpickle",
    "verify",
    "vocab",
)
"""The functions."""
__all__ = [
    "VERBS",
    "Bar",
    "CheckReport",
    "CleanReport",
    "ComparisonReport",
    "DequantizeReport",
    "Document",
    "DraftQuantError",
    "DraftQuantWarning",
    "DraftReplay",
    "EngineCheck",
    "EstimateReport",
    "Findings",
    "GateReport",
    "GoldenText",
    "GraftReport",
    "ImportReport",
    "Inspection",
    "JointReport",
    "ListedRecipe",
    "Listener",
    "Measurement",
    "MergeReport",
    "PlanReport",
    "ProgressListener",
    "QuantizeReport",
    "Recipe",
    "SplitReport",
    "StoreReport",
    "TaskSamples",
    "TraceFolder",
    "TraceInfo",
    "TranscodeReport",
    "Unpickled",
    "Verification",
    "VerifyReport",
    "VocabReport",
    "WrittenReport",
    "card",
    "check",
    "clean",
    "compare",
    "completion",
    "dequantize",
    "estimate",
    "gate",
    "golden",
    "graft",
    "inspect",
    "measure",
    "parity_divergence",
    "parity_draft",
    "parity_run_tasks",
    "parity_sampled",
    "parity_tasks",
    "plan",
    "quantize",
    "recipes_check",
    "recipes_list",
    "recipes_show",
    "record",
    "replay",
    "report",
    "traces_import",
    "traces_info",
    "traces_merge",
    "traces_split",
    "traces_store",
    "transcode",
    "unpickle",
    "verify",
    "vocab",
]


for _name in VERBS:
    explain(globals()[_name])

if not TYPE_CHECKING:  # who checks types would believe that every name is there

    def __getattr__(name: str) -> Any:
        """A type that a verb returns; it is imported when it is asked for."""
        if name in reports.__all__:
            return getattr(reports, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
