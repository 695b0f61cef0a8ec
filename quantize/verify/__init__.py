"""Verification: a folder is read again and compared, without code of the writer and without torch.

The rest of `quantize` uses only the names below. They return answers, none of which is written
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
