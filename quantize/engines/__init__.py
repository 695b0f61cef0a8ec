"""Predicting what an engine will do with a draft folder, without starting a server.

`check_draft` reads config.json and the headers of the tensors, and applies the rules of one version
of one engine. It runs no engine, needs no GPU and imports no torch.
"""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from ..drafts.engine_traits import Finding as Finding
    from .contract import EngineCheck as EngineCheck
    from .contract import EngineName as EngineName
    from .contract import Layer as Layer
    from .contract import Verdict as Verdict
    from .engine_check import check_draft as check_draft

_HOMES = {
    "EngineCheck": ".contract",
    "EngineName": ".contract",
    "Finding": "..drafts.engine_traits",
    "Layer": ".contract",
    "Verdict": ".contract",
    "check_draft": ".engine_check",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
