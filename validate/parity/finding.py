"""What one check of parity found, in the words of the gate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..judging.decision import Verdict

CheckName = Literal["divergence", "task", "sampled", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure against one threshold.

    Attributes:
        check: which kind. what: of what, in words, such as "gsm8k exact_match".
        estimate: the figure, None where there is none. lower, upper: its one-sided bounds at
            `confidence`; None where the figure is a count that needs none.
        threshold: that it is held against; None = none was given, and the verdict INCONCLUSIVE.
        verdict: of this check alone. reason: one sentence.
        details: plain data for the report.
    """

    check: CheckName
    what: str
    estimate: float | None
    lower: float | None = None
    upper: float | None = None
    confidence: float | None = None
    threshold: float | None
    verdict: Verdict
    reason: str
    details: tuple[Mapping[str, object], ...] = ()

    def problem(self) -> str:
        """What no check of ours says; empty for what one may say."""
        if self.verdict in ("PASS", "FAIL") and self.threshold is None:
            return f"verdict {self.verdict} without a threshold"
        if (self.lower is None) != (self.confidence is None):
            return "bounds and their confidence stand together, or neither does"
        if (self.lower is None) != (self.upper is None):
            return "one bound without the other"
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            return f"confidence: expected a share in (0.5, 1), got {self.confidence}"
        return ""


_WORST_FIRST: tuple[Verdict, ...] = ("ANOMALOUS", "FAIL", "INCONCLUSIVE", "PASS")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """ANOMALOUS before FAIL before INCONCLUSIVE before PASS; at least one is given."""
    return min(verdicts, key=_WORST_FIRST.index)
