"""One verdict of several judgements: served, replayed, the server's own noise, parity.

Each is made alone and said in full; the worst one counts.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..counting.paired_change import PairedChange
from ..judging.anomalies import Background
from ..judging.decision import Verdict
from ..judging.interim_analysis import Look
from ..judging.judgement import EXIT_CODES, GateReport
from ..judging.policy import Policy
from ..judging.retuned_gate import RetunedReport
from ..measure.measurement import Measurement
from ..parity.finding import Finding, worst
from .served_gate import judge_measured
from .server_noise import ServerNoise, server_noise

Part = tuple[str, Verdict, str, str | None]
"""Title of a judgement, its verdict, reason and action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointReport:
    """All judgements of one candidate.

    Attributes:
        served: of two measurements; None = none were given.
        replayed: of two replays; None = no traces were given. One of both there is.
        noise: of the server; None = the baseline was measured once.
        findings: of checks of parity.
    """

    served: GateReport | None = None
    replayed: GateReport | RetunedReport | None = None
    noise: ServerNoise | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each judgement."""
        served, replayed, noise = self.served, self.replayed, self.noise
        found: list[Part] = []
        if served is not None:
            found.append(("served", served.verdict, served.reason, served.action))
        if replayed is not None:
            found.append(("replayed", replayed.verdict, replayed.reason, replayed.action))
        if noise is not None:
            found.append(("noise of the server", noise.verdict, noise.reason, noise.action))
        for one in self.findings:
            found.append((f"parity, {one.check}: {one.what}", one.verdict, one.reason, None))
        return tuple(found)

    @property
    def verdict(self) -> Verdict:
        """The worst of all; figures that are not believed are the worst."""
        return worst([verdict for _, verdict, _, _ in self.parts])

    @property
    def reason(self) -> str:
        """Of all."""
        return " ".join(
            f"{title[0].upper()}{title[1:]}: {verdict}. {reason}"
            for title, verdict, reason, _ in self.parts
        )

    @property
    def action(self) -> str | None:
        """Of the first that has the verdict of all and says what to do."""
        actions = (action for _, verdict, _, action in self.parts if verdict == self.verdict)
        return next((action for action in actions if action is not None), None)

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS."""
        return EXIT_CODES[self.verdict]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of all, each once; and in what replay and server differ."""
        served, replayed = self.served, self.replayed
        found = [warning for one in (served, replayed) if one for warning in one.warnings]
        if isinstance(replayed, GateReport) and served is not None:
            found += replay_differences(replayed, served)
        return tuple(dict.fromkeys(found))

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON; each judgement as it stands alone."""
        return {
            "kind": "joint",
            "verdict": self.verdict,
            "reason": self.reason,
            "action": self.action,
            "exit_code": self.exit_code,
            "warnings": list(self.warnings),
            "served": None if self.served is None else self.served.to_mapping(),
            "replayed": None if self.replayed is None else self.replayed.to_mapping(),
            "noise": None if self.noise is None else dataclasses.asdict(self.noise),
            "parity": [dataclasses.asdict(one) for one in self.findings],
        }


def replay_differences(replayed: GateReport, served: GateReport) -> Sequence[str]:
    """In what a replay and two measurements of the same drafts disagree, in sentences."""
    found = []
    if replayed.num_draft_tokens != served.num_draft_tokens:
        found.append(
            f"replayed with K = {replayed.num_draft_tokens}, served with K ="
            f" {served.num_draft_tokens}: their acceptance lengths cannot be compared"
        )
    elif replayed.change is not None and served.change is not None:
        apart = _apart(replayed.change, served.change)
        found.append(
            f"replayed the change is {replayed.change.relative_change:+.2%}, served"
            f" {served.change.relative_change:+.2%}: "
            + ("chance explains the difference" if not apart else
               "more apart than chance explains, see `draftquant reconcile`")
        )  # fmt: skip
    if replayed.verdict != served.verdict:
        found.append(
            f"the verdicts differ: replayed {replayed.verdict}, served {served.verdict}; the worse"
            " one counts"
        )
    return found


def _apart(one: PairedChange, other: PairedChange) -> bool:
    """Whether two estimates of one change lie further apart than two standard errors allow."""
    error = math.hypot(one.standard_error, other.standard_error)
    return abs(one.log_ratio - other.log_ratio) > 2 * error + 1e-12


def judge_jointly(
    runs: tuple[Measurement, Measurement] | None,
    again: Measurement | None,
    replayed: GateReport | RetunedReport | None,
    findings: tuple[Finding, ...],
    policy: Policy,
    *,
    look: Look | None,
    background: Background,
) -> GateReport | JointReport:
    """The verdict on two measurements alone, or the worst of all that is given.

    Args:
        runs: of the baseline and of the candidate; None = nothing was measured.
        again: the baseline measured once more.
        replayed: what traces say.
        findings: of checks of parity.
        policy: the rule, for served and noise.
        look: which of the planned interim analyses this is.
        background: what else is known of the two.

    Raises:
        GateError: see `judge_measured` and `server_noise`.
    """
    served = noise = None
    if runs is not None:
        served = judge_measured(*runs, policy, look=look, background=background)
        if again is not None:
            noise = server_noise(runs[0], again, policy)
        elif replayed is None and not findings:
            return served
    return JointReport(served=served, replayed=replayed, noise=noise, findings=findings)
