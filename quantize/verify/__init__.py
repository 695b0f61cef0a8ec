"""Verification: a folder is read again and compared, without the writer's code or torch."""

from typing import TYPE_CHECKING

from ...recipes.packages import lazy_names

if TYPE_CHECKING:
    from .audit import Audit as Audit
    from .audit import audit_checkpoint as audit_checkpoint
    from .comparison import Compared as Compared
    from .comparison import DequantizedLinear as DequantizedLinear
    from .comparison import Fault as Fault
    from .comparison import VerifyReport as VerifyReport
    from .comparison import check_faults as check_faults
    from .cut_view import verify_cut as verify_cut
    from .graft_verification import GraftVerification as GraftVerification
    from .graft_verification import verify_graft as verify_graft
    from .rewritten import verify_dequantized as verify_dequantized
    from .rewritten import verify_transcoded as verify_transcoded
    from .verification import verify as verify

__all__, __getattr__ = lazy_names(__name__)
