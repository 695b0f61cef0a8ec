"""What a candidate's provenance asks of the gate: traces that it has not seen."""

from ..calibration.static_scales import calibrated_on
from ..quantize.files.provenance import Provenance, QuantizedProvenance
from .errors import GateError


def check_held_out(candidate: Provenance | None, traces_sha256: str) -> None:
    """A draft is never judged on the traces that its activation scales were fitted to.

    Raises:
        GateError: these traces calibrated the candidate.
    """
    if isinstance(candidate, QuantizedProvenance) and calibrated_on(
        candidate.input_scale_origin, traces_sha256
    ):
        raise GateError(
            "--traces",
            "the candidate's input scales were calibrated on these very traces",
            fix="record traces of other prompts for the gate",
        )
