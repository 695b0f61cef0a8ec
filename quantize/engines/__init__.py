"""Predicting what an engine will do with a draft folder, without starting a server.

`check_draft` reads config.json and the headers of the tensors, and applies the rules of one version
of one engine. It runs no engine, needs no GPU and imports no torch.
"""

from ..drafts.engine_traits import Finding
from .contract import EngineCheck, EngineName, Layer, Verdict
from .engine_check import check_draft

__all__ = ["EngineCheck", "EngineName", "Finding", "Layer", "Verdict", "check_draft"]
