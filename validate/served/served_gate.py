"""Two measurements under the gate: the same ladder of rules as for two replays."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...recipes.errors import GateError, refused
from ..counting.paired_change import PairedChange
from ..judging.advice import NO_BACKGROUND, Background
from ..judging.figures import ServedFigures
from ..judging.judgement import GateReport, judge_counts
from ..judging.policy import Look, Policy, Verdict, Wording
from ..measure.measurement import Measurement, differing_arguments
from .measurement_pair import SENTENCES, ServedPair, pair_measurements


def wording(*names: str) -> Wording:
    """A verdict's words for what was done; later names replace words of earlier ones."""
    rows = [SENTENCES["wording"][name] for name in names]
    said = {key: value for row in rows for key, value in row.items()}
    return Wording(**said | {"join": tuple(said["join"])})


SERVED = wording("served")
UNCHANGED = wording("served", "unchanged")
"""The phrase for a candidate that does what its baseline did."""
SAID_FROM = 0.02
"""Share of verify steps with fewer than K proposals at which a warning begins."""


def judge_measured(
    baseline: Measurement,
    candidate: Measurement,
    policy: Policy,
    *,
    look: Look | None = None,
    background: Background = NO_BACKGROUND,
) -> GateReport:
    """Compare two measurements of the same prompts, of the BF16 draft and of the quantized one.

    Raises:
        GateError: both are one measurement, or of one draft; neither server drafted, or it drafted
            with another draft than `background` names; or the outputs are too short.
    """
    pair = pair_measurements(baseline, candidate)
    digests = [draft_sha256(one) for one in (baseline, candidate)]
    if None in digests and said_the_same(baseline, candidate):
        raise refused(GateError, candidate.name, __file__, "never-told-apart", name=baseline.name)
    if digests[0] is not None and digests[0] == digests[1] and not background.unrelated:
        facts = {"name": baseline.name, "sha256": digests[0][:12]}
        raise refused(GateError, candidate.name, __file__, "draft-given-twice", **facts)
    _check_folders(pair, digests, background)
    known = dataclasses.replace(
        background,
        baseline_sha256=background.baseline_sha256 or digests[0],
        candidate_sha256=background.candidate_sha256 or digests[1],
        warnings=(*background.warnings, *warnings_of(pair)),
    )
    unchanged = "" if background.unrelated else _unchanged(baseline, candidate)
    report = judge_counts(
        pair.baseline,
        pair.candidate,
        policy,
        incomparable=pair.incomparable or unchanged,
        estimand=served_estimand(baseline),
        wording=SERVED if pair.incomparable else UNCHANGED,
        look=look,
        background=known,
    )
    confidence = look.adjusted_confidence(policy.confidence) if look else policy.confidence
    return dataclasses.replace(report, served=pair.figures(confidence))


def draft_sha256(measurement: Measurement) -> str | None:
    """Identity of the draft that was served; None = not known."""
    speculation = measurement.setup.speculation
    return None if speculation is None else speculation.draft_sha256


def said_the_same(one: Measurement, other: Measurement) -> bool:
    """Whether two runs got the same outputs by the same verify steps; times may differ."""
    untimed = {"began": 0.0, "time_to_first_token": None, "latency": 0.0, "num_attempts": 1}
    records = [[dataclasses.replace(r, **untimed) for r in run.records] for run in (one, other)]  # type: ignore[arg-type]
    return records[0] == records[1]


def _unchanged(baseline: Measurement, candidate: Measurement) -> str:
    """A warning that a format which rounds changed no verify step, which never happens; or ""."""
    plain, quantized = (
        run.setup.speculation and run.setup.speculation.draft_quantization
        for run in (baseline, candidate)
    )
    if plain != "none" or quantized in (None, "none"):
        return ""
    steps = [[(r.histogram, r.accepted) for r in run.records] for run in (baseline, candidate)]
    if steps[0] != steps[1]:
        return ""
    return (
        f"the draft of {candidate.name} is declared to be quantized ({quantized}), but every verify"
        f" step accepted as many tokens as with {baseline.name}, which never happens after rounding"
    )


def _check_folders(pair: ServedPair, digests: Sequence[str | None], background: Background) -> None:
    """Check that each served draft is the one whose folder is judged."""
    given = (background.baseline_sha256, background.candidate_sha256)
    for measurement, served, folder in zip(pair.measurements, digests, given, strict=True):
        if served is not None and folder is not None and served != folder:
            facts = {"expected": folder[:12], "got": served[:12]}
            raise refused(GateError, measurement.name, __file__, "another-draft", **facts)


def warnings_of(pair: ServedPair) -> Iterator[str]:
    """What a reader must know about two runs, sentences without a full stop."""
    said = SENTENCES["warnings"]
    if unnamed := [one.name for one in pair.measurements if draft_sha256(one) is None]:
        do = "does" if len(unnamed) == 1 else "do"
        yield said["unnamed"].format(names=" and ".join(unnamed), do=do)
    runs = [(one.name, own) for one in pair.measurements if (own := one.setup.speculation)]
    for name, own in runs:
        if not own.acceptance_told:
            yield said["acceptance"].format(name=name)
    if found := differing_arguments(*(one.setup.server for one in pair.measurements)):
        yield said["started"].format(found="; ".join(found))
    for name, own in runs:
        if own.told_by == "user":
            yield said["served_as"].format(name=name, served=own.served_draft, draft=own.draft)
    one, other = (measurement.setup.asked.concurrency for measurement in pair.measurements)
    if one != other:
        yield said["in_flight"].format(one=one, other=other)
    for measurement in pair.measurements:
        share = _short_share(measurement)
        if share > SAID_FROM:
            yield said["short"].format(share=share, name=measurement.name)
    if not pair.incomparable and not any(output.placed for output in pair.outputs):
        yield said["placeless"]


def _short_share(measurement: Measurement) -> float:
    """Share of its steps with fewer than K proposals, as far as the engine reports it."""
    speculation = measurement.setup.speculation
    drafted = [k for record in measurement.records for k in record.drafted or ()]
    if speculation is None or not drafted:
        return 0.0
    return sum(k < speculation.num_draft_tokens for k in drafted) / len(drafted)


def served_estimand(measurement: Measurement) -> str:
    """What the acceptance length of a measurement describes, in words."""
    asked, server = measurement.setup.asked, measurement.setup.server
    how = f"speculative decoding by {server.engine} {server.version}"
    more = f", top-p {asked.top_p:g}" if asked.top_p < 1 else ""
    more += f", top-k {asked.top_k}" if asked.top_k else ""
    return drawn_or_greedy(how, asked.temperature, more)


def drawn_or_greedy(how: str, temperature: float, more: str = "") -> str:
    """How text was chosen, and that it was served."""
    return f"sampled (temperature {temperature:g}{more}) {how}" if temperature else f"greedy {how}"


DRIFT_CONFIDENCE = 0.995
"""For each bound of a change that is no noise: one sound server in a hundred is called unsteady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNoise:
    """The baseline compared with itself, measured again.

    Attributes:
        verdict: PASS if the noise is smaller than the limit; INCONCLUSIVE if it is as large;
            ANOMALOUS if the server changed in between.
        change, drift: at the policy's confidence and at `DRIFT_CONFIDENCE`; None where the two
            cannot be compared, or have too few prompts.
    """

    name: str
    verdict: Verdict
    reason: str
    action: str | None
    change: PairedChange | None
    drift: PairedChange | None
    served: ServedFigures


def server_noise(baseline: Measurement, again: Measurement, policy: Policy) -> ServerNoise:
    """Compare a run with its repetition on the same server, with the same draft."""
    pair = pair_measurements(baseline, again)
    digests = {draft_sha256(one) for one in (baseline, again)} - {None}
    if len(digests) > 1:
        raise refused(GateError, again.name, __file__, "another-draft-again", name=baseline.name)
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
    """Verdict, reason and action; `drift` is `change` at `DRIFT_CONFIDENCE`."""
    limit, found = policy.max_relative_drop, ""
    if change is not None:
        found = (
            "the second measurement of the baseline differs from the first by"
            " {} (bounds {} and {})".format(*change.in_percent())
        )
    if incomparable:
        case = "another_run"
    elif change is None or drift is None:
        case = "too_few"
    elif not drift.lower <= 0 <= drift.upper:
        case = "changed"
    elif (change.upper - change.lower) / 2 >= -math.log1p(-limit):
        case = "large"
    else:
        case = "small"
    row, why = SENTENCES["noise"][case], f"{incomparable[:1].upper()}{incomparable[1:]}"
    reason = row["reason"].format(incomparable=why, found=found, limit=limit)
    return row["verdict"], reason, row.get("action")
