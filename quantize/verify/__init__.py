"""Verification: a folder is read again and compared, without code of the writer and without torch.

The rest of `quantize` uses only the names below. They return answers, none of which is written
into a tensor.
"""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from .audit import Audit as Audit
    from .audit import audit_checkpoint as audit_checkpoint
    from .cut_verification import verify_cut as verify_cut
    from .folder_verification import verify as verify
    from .graft_verification import GraftVerification as GraftVerification
    from .graft_verification import verify_graft as verify_graft
    from .rewritten import DequantizedLinear as DequantizedLinear
    from .rewritten import DequantizedReport as DequantizedReport
    from .rewritten import TranscodedReport as TranscodedReport
    from .rewritten import verify_dequantized as verify_dequantized
    from .rewritten import verify_transcoded as verify_transcoded
    from .verify_report import Fault as Fault
    from .verify_report import LinearFinding as LinearFinding
    from .verify_report import VerifyReport as VerifyReport
    from .verify_report import check_faults as check_faults

_HOMES = {
    "Audit": ".audit",
    "DequantizedLinear": ".rewritten",
    "DequantizedReport": ".rewritten",
    "Fault": ".verify_report",
    "GraftVerification": ".graft_verification",
    "LinearFinding": ".verify_report",
    "TranscodedReport": ".rewritten",
    "VerifyReport": ".verify_report",
    "audit_checkpoint": ".audit",
    "check_faults": ".verify_report",
    "verify": ".folder_verification",
    "verify_cut": ".cut_verification",
    "verify_dequantized": ".rewritten",
    "verify_transcoded": ".rewritten",
    "verify_graft": ".graft_verification",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
