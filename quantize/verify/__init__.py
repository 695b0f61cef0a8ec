"""Verification: a folder re-read and judged, with nothing of what wrote it, and without torch.

What is named here is all that the rest of quantize asks of it: answers, of which nothing is written
into a tensor.
"""

from .codes import not_nearest
from .dequantized import DequantizedLinear, DequantizedReport, verify_dequantized
from .excludes import exclude_faults
from .folder import verify
from .report import Fault, LinearFinding, VerifyReport
from .transcoded import TranscodedReport, verify_transcoded
from .tuned import verify_tuned

__all__ = [
    "DequantizedLinear",
    "DequantizedReport",
    "Fault",
    "LinearFinding",
    "TranscodedReport",
    "VerifyReport",
    "exclude_faults",
    "not_nearest",
    "verify",
    "verify_dequantized",
    "verify_transcoded",
    "verify_tuned",
]
