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
from .scripts.api.card import card
from .scripts.api.check import check
from .scripts.api.clean import clean
from .scripts.api.compare import compare
from .scripts.api.completion import completion
from .scripts.api.dequantize import dequantize
from .scripts.api.estimate import estimate
from .scripts.api.gate import gate
from .scripts.api.golden import golden
from .scripts.api.graft import graft
from .scripts.api.inspect import inspect
from .scripts.api.keywords import explain
from .scripts.api.listener import Bar, Listener, ProgressListener
from .scripts.api.measure import measure
from .scripts.api.parity_divergence import parity_divergence
from .scripts.api.parity_draft import parity_draft
from .scripts.api.parity_run_tasks import parity_run_tasks
from .scripts.api.parity_sampled import parity_sampled
from .scripts.api.parity_tasks import parity_tasks
from .scripts.api.plan import plan
from .scripts.api.quantize import quantize
from .scripts.api.recipes import recipes_check, recipes_list, recipes_show
from .scripts.api.record import record
from .scripts.api.replay import replay
from .scripts.api.report import report
from .scripts.api.traces import (
    traces_import,
    traces_info,
    traces_merge,
    traces_split,
    traces_store,
)
from .scripts.api.transcode import transcode
from .scripts.api.unpickle import unpickle
from .scripts.api.verify import verify
from .scripts.api.vocab import vocab

if TYPE_CHECKING:
    from .scripts.api.reports import (
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
