"""One verdict from several judgements: served, replayed, the server's noise, parity."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from ..counting.acceptance_counts import Verification
from ..foreign.foreign_measurement import ForeignPair
from ..judging.advice import Background
from ..judging.judgement import GateReport
from ..judging.policy import EXIT_CODES, Look, Policy, Verdict, worst
from ..judging.published import Published
from ..measure.measurement import Measurement
from ..parity.finding import ParityFinding
from .foreign_gate import judge_foreign
from .served_gate import ServerNoise, judge_measured, server_noise

Part = tuple[str, Verdict, str, str | None]
"""Title of a judgement, its verdict, reason and action."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JointReport(Published):
    """The verdict of several judgements of one candidate; the worst one counts.

    Attributes:
        verdict: the worst verdict of all; ANOMALOUS is the worst.
        reason: the reasons of all judgements.
        action: what to do, from the first judgement that has the verdict of all and an action.
        exit_code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS.
        warnings: the warnings of all judgements, and where replay and server differ.
        served: the comparison of two measurements; None where none were given.
        replayed: the comparison of two replays; None where no traces were given.
        noise: the server's own noise; None where the baseline was measured once.
        parity: the findings of parity checks.
    """

    kind: Literal["joint"] = "joint"
    verdict: Verdict
    reason: str
    action: str | None
    exit_code: int
    warnings: tuple[str, ...]
    served: GateReport | None
    replayed: GateReport | None
    noise: ServerNoise | None
    parity: tuple[ParityFinding, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each judgement: title, verdict, reason and action."""
        return _parts(self.served, self.replayed, self.noise, self.parity)

    def problem(self) -> str:
        """What contradicts itself; empty if nothing does."""
        both = self.served, self.replayed
        return "served, replayed: expected one of them" if both == (None, None) else ""

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON; each judgement as it would be alone."""
        return dataclasses.asdict(self)

    @override
    def brief(self) -> Mapping[str, object]:
        return {
            "verdict": self.verdict,
            **{title: verdict for title, verdict, _, _ in self.parts},
            "warnings": len(self.warnings) or None,
        }


def joint_report(
    *,
    served: GateReport | None = None,
    replayed: GateReport | None = None,
    noise: ServerNoise | None = None,
    parity: tuple[ParityFinding, ...] = (),
    warnings: Sequence[str] = (),
) -> JointReport:
    """What several judgements say together; `warnings` belong to none, without a full stop."""
    parts = _parts(served, replayed, noise, parity)
    verdict = worst(verdict for _, verdict, _, _ in parts)
    actions = (action for _, part_verdict, _, action in parts if part_verdict == verdict)
    sentences = [*(warning for r in (served, replayed) if r for warning in r.warnings), *warnings]
    if replayed is not None and served is not None:
        sentences += replay_differences(replayed, served)
    return JointReport(
        verdict=verdict,
        reason=" ".join(
            f"{title[0].upper()}{title[1:]}: {part_verdict}. {reason}"
            for title, part_verdict, reason, _ in parts
        ),
        action=next((action for action in actions if action is not None), None),
        exit_code=EXIT_CODES[verdict],
        warnings=tuple(dict.fromkeys(sentences)),
        served=served,
        replayed=replayed,
        noise=noise,
        parity=parity,
    )


def _parts(
    served: GateReport | None,
    replayed: GateReport | None,
    noise: ServerNoise | None,
    parity: Sequence[ParityFinding],
) -> tuple[Part, ...]:
    titled = (("served", served), ("replayed", replayed), ("server noise", noise))
    return (
        *((title, r.verdict, r.reason, r.action) for title, r in titled if r is not None),
        *_other_rule(served, replayed),
        *((f"parity, {f.check}: {f.what}", f.verdict, f.reason, None) for f in parity),
    )


def _other_rule(served: GateReport | None, replayed: GateReport | None) -> Iterator[Part]:
    """A warning that servers verified drawn proposals by another rule than replay counts by."""
    if not (served and served.served and replayed) or replayed.draft_sampling in (None, "greedy"):
        return
    counted: Verification = "block" if replayed.draft_sampling == "block" else "standard"
    rule = served.served.verification
    if rule not in (None, counted):
        name = "block" if rule == "block" else "probabilistic"
        yield (
            "verification",
            "ANOMALOUS",
            (
                f"The servers verified drawn proposals by the {rule} rule, and the replay counts"
                f" by the {counted} rule."
            ),
            (
                f"Replay with --draft-sampling {name}, or start both servers with the rule that"
                " you mean."
            ),
        )


def replay_differences(replayed: GateReport, served: GateReport) -> Sequence[str]:
    """How a replay and two measurements of the same drafts disagree, in sentences."""
    differences = []
    if replayed.num_draft_tokens != served.num_draft_tokens:
        differences.append(
            f"the replay used K = {replayed.num_draft_tokens} and the servers K ="
            f" {served.num_draft_tokens}, so their acceptance lengths cannot be compared"
        )
    elif replayed.change is not None and served.change is not None:
        by_replay, by_servers = replayed.change, served.change
        error = math.hypot(by_replay.standard_error, by_servers.standard_error)
        apart = abs(by_replay.log_ratio - by_servers.log_ratio) > 2 * error + 1e-12
        differences.append(
            f"the change is {replayed.change.relative_change:+.2%} by replay and"
            f" {served.change.relative_change:+.2%} by the servers: chance"
            f" {'does not explain' if apart else 'explains'} the difference"
        )
    if replayed.verdict != served.verdict:
        differences.append(
            f"the verdicts differ: {replayed.verdict} by replay, {served.verdict} by the servers;"
            " the worse one counts"
        )
    return differences


def judge_jointly(
    runs: tuple[Measurement, Measurement] | ForeignPair | None,
    again: Measurement | None,
    replayed: GateReport | None,
    findings: tuple[ParityFinding, ...],
    policy: Policy,
    *,
    look: Look | None,
    background: Background,
    warnings: Sequence[str],
) -> GateReport | JointReport:
    """The verdict on two measurements alone, or the worst of all inputs."""
    served = noise = None
    if isinstance(runs, ForeignPair):
        served = judge_foreign(runs, policy, look=look, background=background)
        if replayed is None and not findings:
            return served
    elif runs is not None:
        served = judge_measured(*runs, policy, look=look, background=background)
        if again is not None:
            noise = server_noise(runs[0], again, policy)
        elif replayed is None and not findings:
            return served
    return joint_report(
        served=served, replayed=replayed, noise=noise, parity=findings, warnings=warnings
    )
