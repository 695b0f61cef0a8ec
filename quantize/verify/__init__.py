"""Verification: a folder re-read and judged, with nothing of what wrote it, and without torch.

What is named here is all that the rest of quantize asks of it: answers, of which nothing is written
into a tensor.
"""

from .codes import not_nearest
from .dequantized_verification import DequantizedLinear, DequantizedReport, verify_dequantized
from .exclude_list_faults import exclude_faults
from .folder_verification import verify
from .transcoded_verification import TranscodedReport, verify_transcoded
from .tuned_verification import verify_tuned
from .verify_report import Fault, LinearFinding, VerifyReport

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
