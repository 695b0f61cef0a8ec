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
from .scripts.api.dequantize import dequantize
from .scripts.api.gate import gate
from .scripts.api.plan import plan
from .scripts.api.push import push
from .scripts.api.quantize import quantize
from .scripts.api.record import record
from .scripts.api.replay import replay
from .scripts.api.report import report
from .scripts.api.transcode import transcode
from .scripts.api.verify import verify
from .scripts.api.watch import Bar, Watch

if TYPE_CHECKING:
    from .scripts.api.reports import (
        CheckReport,
        DequantizeReport,
        Document,
        DraftReplay,
        EngineCheck,
        GateReport,
        JointReport,
        PlanReport,
        QuantizeReport,
        RetunedReport,
        TranscodeReport,
        Verification,
        VerifyReport,
    )

VERBS = (
    "card", "check", "dequantize", "gate", "plan", "push", "quantize", "record", "replay", "report",
    "transcode", "verify",
)  # fmt: skip
"""The functions."""
__all__ = [
    "Bar",
    "CheckReport",
    "DequantizeReport",
    "Document",
    "DraftQuantError",
    "DraftQuantWarning",
    "DraftReplay",
    "EngineCheck",
    "GateReport",
    "JointReport",
    "PlanReport",
    "QuantizeReport",
    "Recipe",
    "RetunedReport",
    "TranscodeReport",
    "Verification",
    "VerifyReport",
    "Watch",
    "card",
    "check",
    "dequantize",
    "gate",
    "plan",
    "push",
    "quantize",
    "record",
    "replay",
    "report",
    "transcode",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A type that a verb returns; it is imported when it is asked for."""
    if name in reports.__all__:
        return getattr(reports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
