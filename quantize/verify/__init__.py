"""Verification: a folder re-read and judged, with nothing of what wrote it, and without torch."""

from .folder import verify
from .report import Fault, LinearFinding, VerifyReport

__all__ = ["Fault", "LinearFinding", "VerifyReport", "verify"]
