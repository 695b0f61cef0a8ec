"""How much a server differs from itself: the baseline's measurement, and the same run again."""

import math
from dataclasses import dataclass

from ..counting.paired_change import PairedChange
from ..errors import GateError
from ..judging.figures import ServedFigures
from ..judging.policy import Policy
from ..judging.verdict import Verdict
from ..measure.measurement import Measurement
from .measurement_pair import pair_measurements
from .served_gate import draft_sha256

DRIFT_CONFIDENCE = 0.995
"""Of each bound of a change that is no noise: one sound server in a hundred is called unsteady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNoise:
    """The baseline against itself.

    Attributes:
        verdict: PASS if the noise is smaller than the limit; INCONCLUSIVE if it is as large;
            ANOMALOUS if the server changed in between.
        change: from the first run to the second at the policy's confidence; None where the two
            cannot be compared, or have too few prompts.
        drift: the same at `DRIFT_CONFIDENCE`.
    """

    name: str
    verdict: Verdict
    reason: str
    action: str | None
    change: PairedChange | None
    drift: PairedChange | None
    served: ServedFigures


def server_noise(baseline: Measurement, again: Measurement, policy: Policy) -> ServerNoise:
    """Compare a run with its repetition.

    Args:
        again: of the same draft on the same server, measured once more.

    Raises:
        GateError: both are one measurement, or of two drafts.
    """
    pair = pair_measurements(baseline, again)
    digests = {draft_sha256(one) for one in (baseline, again)} - {None}
    if len(digests) > 1:
        raise GateError(
            again.name,
            f"measured another draft than {baseline.name}, whose noise it should show",
            fix="--baseline-again takes a second run of the BF16 draft",
        )
    change, drift = pair.change(policy.confidence), pair.change(DRIFT_CONFIDENCE)
    verdict, reason, action = judged_noise(pair.incomparable, change, drift, policy)
    return ServerNoise(
        name=again.name,
        verdict=verdict,
        reason=reason,
        action=action,
        change=change,
        drift=drift,
        served=pair.figures(policy.confidence),
    )


def judged_noise(
    incomparable: str, change: PairedChange | None, drift: PairedChange | None, policy: Policy
) -> tuple[Verdict, str, str | None]:
    """Verdict, reason and action.

    Args:
        incomparable: see `Evidence`.
        change: see `ServerNoise`.
        drift: at `DRIFT_CONFIDENCE`.
    """
    if incomparable:
        what = f"{incomparable[0].upper()}{incomparable[1:]}: this run does not repeat the first."
        return "ANOMALOUS", what, "Measure the BF16 draft again, on the same server as before."
    if change is None or drift is None:
        return (
            "INCONCLUSIVE",
            "There are too few prompts to estimate the noise.",
            "Measure more prompts.",
        )
    lower, upper = change.relative_bounds
    found = (
        f"the second measurement of the baseline differs from the first by"
        f" {change.relative_change:+.2%} (bounds {lower:+.2%} and {upper:+.2%})"
    )
    if not drift.lower <= 0 <= drift.upper:
        return (
            "ANOMALOUS",
            f"The server changed between the two measurements: {found}, and chance does that in"
            " fewer than one of a hundred pairs of runs.",
            "Look for a change of the server's load, version or settings, then measure all runs"
            " again in turns.",
        )
    noise = (change.upper - change.lower) / 2
    if noise >= -math.log1p(-policy.max_relative_drop):
        return (
            "INCONCLUSIVE",
            f"The server's noise is as large as the limit of {policy.max_relative_drop:.2%}:"
            f" {found}.",
            "Measure more prompts or longer outputs, or keep fewer requests in flight.",
        )
    return (
        "PASS",
        f"The server's noise is smaller than the limit of {policy.max_relative_drop:.2%}: {found}.",
        None,
    )
