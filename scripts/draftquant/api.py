"""Every verb as a function, and the types that they take and return.

    from draftquant import api as dq

    dq.quantize("DRAFT", "fp8-ptpc", "OUT")
    assert dq.verify("OUT", against="DRAFT").ok
    print(dq.gate("DRAFT", "OUT", "TRACES").verdict)

Each function is what the command of its name runs, and returns what that prints. torch is loaded by
the run that needs it.
"""

from typing import TYPE_CHECKING, Any

from .recipes import Recipe as Recipe
from .recipes.errors import DraftQuantError as DraftQuantError
from .recipes.errors import DraftQuantWarning as DraftQuantWarning
from .recipes.listener import Bar as Bar
from .recipes.listener import Listener as Listener
from .scripts.frame import reports
from .scripts.frame.ears import ProgressListener as ProgressListener
from .scripts.verbs.card import card as card
from .scripts.verbs.check import check as check
from .scripts.verbs.clean import clean as clean
from .scripts.verbs.compare import compare as compare
from .scripts.verbs.completion import completion as completion
from .scripts.verbs.dequantize import dequantize as dequantize
from .scripts.verbs.estimate import estimate as estimate
from .scripts.verbs.gate import gate as gate
from .scripts.verbs.golden import golden as golden
from .scripts.verbs.graft import graft as graft
from .scripts.verbs.inspect import inspect as inspect
from .scripts.verbs.measure import measure as measure
from .scripts.verbs.parity import parity_divergence as parity_divergence
from .scripts.verbs.parity import parity_draft as parity_draft
from .scripts.verbs.parity import parity_run_tasks as parity_run_tasks
from .scripts.verbs.parity import parity_sampled as parity_sampled
from .scripts.verbs.parity import parity_tasks as parity_tasks
from .scripts.verbs.plan import plan as plan
from .scripts.verbs.quantize import quantize as quantize
from .scripts.verbs.recipes import recipes_check as recipes_check
from .scripts.verbs.recipes import recipes_list as recipes_list
from .scripts.verbs.recipes import recipes_show as recipes_show
from .scripts.verbs.record import record as record
from .scripts.verbs.replay import replay as replay
from .scripts.verbs.report import report as report
from .scripts.verbs.traces import traces_import as traces_import
from .scripts.verbs.traces import traces_info as traces_info
from .scripts.verbs.traces import traces_merge as traces_merge
from .scripts.verbs.traces import traces_split as traces_split
from .scripts.verbs.traces import traces_store as traces_store
from .scripts.verbs.transcode import transcode as transcode
from .scripts.verbs.unpickle import unpickle as unpickle
from .scripts.verbs.verify import verify as verify
from .scripts.verbs.vocab import vocab as vocab

if TYPE_CHECKING:
    from .scripts.frame.reports import *  # noqa: F403

VERBS = tuple(sorted(name for name, value in globals().items() if hasattr(value, "form")))
"""The functions."""
_TYPES = ("Bar", "DraftQuantError", "DraftQuantWarning", "Listener", "ProgressListener", "Recipe")
__all__ = sorted({"VERBS", *VERBS, *_TYPES, *reports.__all__})

if not TYPE_CHECKING:  # otherwise type checkers would take every name as existing

    def __getattr__(name: str) -> Any:
        """A type that a verb returns; imported on first use."""
        if name in reports.__all__:
            return getattr(reports, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
