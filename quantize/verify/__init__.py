"""Verification: a folder is read again and compared, without code of the writer and without torch.

The rest of `quantize` uses only the names below. They return answers, none of which is written
into a tensor.
"""

from typing import TYPE_CHECKING

from ...recipes.lazy_names import lazy_names

if TYPE_CHECKING:
    from .cut_verification import verify_cut as verify_cut
    from .dequantized_verification import DequantizedLinear as DequantizedLinear
    from .dequantized_verification import DequantizedReport as DequantizedReport
    from .dequantized_verification import verify_dequantized as verify_dequantized
    from .folder_verification import verify as verify
    from .graft_verification import GraftVerification as GraftVerification
    from .graft_verification import verify_graft as verify_graft
    from .transcoded_verification import TranscodedReport as TranscodedReport
    from .transcoded_verification import verify_transcoded as verify_transcoded
    from .verify_report import Fault as Fault
    from .verify_report import LinearFinding as LinearFinding
    from .verify_report import VerifyReport as VerifyReport
    from .verify_report import check_faults as check_faults

_HOMES = {
    "DequantizedLinear": ".dequantized_verification",
    "DequantizedReport": ".dequantized_verification",
    "Fault": ".verify_report",
    "GraftVerification": ".graft_verification",
    "LinearFinding": ".verify_report",
    "TranscodedReport": ".transcoded_verification",
    "VerifyReport": ".verify_report",
    "check_faults": ".verify_report",
    "verify": ".folder_verification",
    "verify_cut": ".cut_verification",
    "verify_dequantized": ".dequantized_verification",
    "verify_transcoded": ".transcoded_verification",
    "verify_graft": ".graft_verification",
}
__all__ = [*_HOMES]
__getattr__ = lazy_names(__name__, _HOMES)
