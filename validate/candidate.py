"""What a candidate's provenance asks of the gate: a policy, and traces that it has not seen."""

from ..calibration.static_scales import calibrated_on
from ..quantize.files.provenance import Provenance, QuantizedProvenance
from ..recipes.schema import PolicyName
from .errors import GateError


def policy_of(candidate: Provenance | None) -> PolicyName:
    """The policy that the candidate's recipe asks for, else `release`."""
    if isinstance(candidate, QuantizedProvenance):
        return candidate.recipe.gate.policy
    return "release"


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
