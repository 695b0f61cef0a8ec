"""Two measurements under the gate: the same ladder of rules as for two replays."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...recipes.errors import GateError
from ..counting.paired_change import PairedChange
from ..judging.advice import NO_BACKGROUND, Background
from ..judging.figures import ServedFigures
from ..judging.judgement import GateReport, judge_counts
from ..judging.policy import Look, OneDraft, Policy, Verdict, Wording
from ..measure.measurement import Measurement, differing_arguments, servers_apart
from .measurement_pair import ServedPair, pair_measurements

SERVED = Wording(
    both_again="Measure both drafts on the same prompts, with one engine, template and K.",
    take="Measure both servers on",
    count="draftquant measure --server URL --engine ENGINE --prompts PROMPTS --out A.jsonl",
    gate="draftquant gate --measured A.jsonl B.jsonl",
    join="Put the prompts of before into PROMPTS too, so that both runs measure all of them.",
    gate_joined="draftquant gate --measured A.jsonl B.jsonl",
    longer="ask for longer outputs (measure --max-new-tokens), or serve a smaller K",
)
UNCHANGED = dataclasses.replace(
    SERVED,
    both_again="Check which draft the candidate's server runs (draftquant measure --show"
    " B.jsonl), start it with the quantized draft, and measure again.",
)
"""The phrase for a candidate that does what its baseline did."""
OTHER_ENGINE = dataclasses.replace(
    SERVED,
    both_again=f"{SERVED.both_again}\nTo judge two engines or versions, measure one draft on both:"
    " measure --draft DRAFT.",
)
_NOT_REPORTED = ("nothing that the servers report",)
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
    """Compare two measurements of the same prompts: of two drafts, or of one on two servers.

    Raises:
        GateError: both are one measurement, or of one draft on servers that report no difference;
            neither server drafted, or it drafted with another draft than `background` names; or
            the outputs are too short.
    """
    digests = [draft_sha256(measurement) for measurement in (baseline, candidate)]
    apart: tuple[str, ...] = ()
    if digests[0] is not None and digests[0] == digests[1]:
        apart = servers_apart(baseline.setup, candidate.setup)
        if background.unrelated:
            apart = apart or _NOT_REPORTED
    pair = pair_measurements(baseline, candidate, apart)
    if None in digests and said_the_same(baseline, candidate):
        raise GateError(
            candidate.name,
            f"has the same outputs and verify steps as {baseline.name}, and does not record that"
            " its server ran another draft: it is the same measurement, or the same draft was"
            " measured twice",
            fix="measure each server with --draft, which records the draft it runs",
        )
    if digests[0] is not None and digests[0] == digests[1] and not apart:
        raise GateError(
            candidate.name,
            f"measured the same draft as {baseline.name} (tensors {digests[0][:12]}), on a server"
            " that reports the same engine, version and settings",
            fix="give the measurement of the quantized draft; to judge servers that differ in what"
            " they do not report, add --unrelated; to show the server's noise, give a second"
            " measurement of the BF16 draft to --baseline-again",
        )
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
        wording=_wording(pair),
        look=look,
        background=known,
    )
    confidence = look.adjusted_confidence(policy.confidence) if look else policy.confidence
    return dataclasses.replace(report, served=pair.figures(confidence))


def _wording(pair: ServedPair) -> Wording:
    if pair.apart:
        return on_servers(pair.apart)
    engines = {(m.setup.server.engine, m.setup.server.version) for m in pair.measurements}
    other = OTHER_ENGINE if len(engines) > 1 else SERVED
    return other if pair.incomparable else UNCHANGED


def on_servers(apart: tuple[str, ...]) -> Wording:
    """The words for one draft on two servers that differ in this."""
    told = "; ".join(apart)
    return dataclasses.replace(
        SERVED,
        both_again="Measure the draft on both servers with the same prompts, template and K.",
        one_draft=OneDraft(
            first="on the first server",
            second="on the second server",
            cause=f"what differs between the servers ({told})",
            loses="Give the second server what the first one has, one difference after the other,"
            f" and measure again: {told}. Where a version differs, look for changed defaults in"
            " its release notes, and set them by their flags.",
            breaks="Let the second server's engine load the draft alone, and compare what it"
            " computes: draftquant check DRAFT --engine ENGINE --ask",
        ),
    )


def draft_sha256(measurement: Measurement) -> str | None:
    """Identity of the draft that was served; None = not known."""
    speculation = measurement.setup.speculation
    return None if speculation is None else speculation.draft_sha256


def said_the_same(first: Measurement, second: Measurement) -> bool:
    """Whether two runs got the same outputs by the same verify steps; times may differ."""
    untimed = {"began": 0.0, "time_to_first_token": None, "latency": 0.0, "num_attempts": 1}
    records = [[dataclasses.replace(r, **untimed) for r in run.records] for run in (first, second)]  # type: ignore[arg-type]
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
    given = (background.baseline_sha256, background.candidate_sha256)
    for measurement, served, folder in zip(pair.measurements, digests, given, strict=True):
        if served is not None and folder is not None and served != folder:
            raise GateError(
                measurement.name,
                f"was served with another draft: expected tensors {folder[:12]}, got {served[:12]}",
                fix="give the BF16 draft and its measurement first, the quantized ones second",
            )


def warnings_of(pair: ServedPair) -> Iterator[str]:
    """What a reader must know about two runs."""
    if unnamed := [m.name for m in pair.measurements if draft_sha256(m) is None]:
        do = "does" if len(unnamed) == 1 else "do"
        yield (
            f"{' and '.join(unnamed)} {do} not record which draft was served (measure --draft), so"
            " nothing shows that the candidate was quantized from the baseline"
        )
    runs = [(m.name, spec) for m in pair.measurements if (spec := m.setup.speculation)]
    for name, spec in runs:
        if not spec.acceptance_told:
            yield (
                f"the server of {name} does not report its acceptance rule, so settings that"
                " change the target's outputs would go unnoticed (see `draftquant parity`)"
            )
    if pair.apart:
        sha256 = draft_sha256(pair.measurements[0]) or ""
        yield (
            f"one draft (tensors {sha256[:12]}) ran on both servers, which differ in"
            f" {'; '.join(pair.apart)}"
        )
    elif arguments := differing_arguments(*(m.setup.server for m in pair.measurements)):
        yield f"the two servers were started differently ({'; '.join(arguments)})"
    for name, spec in runs:
        if spec.told_by == "user":
            yield (
                f"the server of {name} calls its draft {spec.served_draft}; only --served-as says"
                f" that this is {spec.draft}"
            )
    first, second = (measurement.setup.asked.concurrency for measurement in pair.measurements)
    if first != second:
        yield (
            f"the two runs had {first} and {second} requests in flight, so that their outputs"
            " differ more often"
        )
    for measurement in pair.measurements:
        share = _short_share(measurement)
        if share > SAID_FROM:
            yield (
                f"in {share:.1%} of the verify steps of {measurement.name} fewer than K tokens"
                " were proposed, and such steps accept less with any draft"
            )
    if not pair.incomparable and not any(output.placed for output in pair.outputs):
        yield (
            "the runs do not record which verify steps lie in text that both servers wrote, so"
            " whole outputs are compared, with wider bounds"
        )


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
    digests = {draft_sha256(measurement) for measurement in (baseline, again)} - {None}
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
    """Verdict, reason and action; `drift` is `change` at `DRIFT_CONFIDENCE`."""
    limit, figures = policy.max_relative_drop, ""
    if change is not None:
        figures = (
            "the second measurement of the baseline differs from the first by"
            " {} (bounds {} and {})".format(*change.in_percent())
        )
    if incomparable:
        why = f"{incomparable[:1].upper()}{incomparable[1:]}"
        return (
            "ANOMALOUS",
            f"{why}: this run does not repeat the first.",
            "Measure the BF16 draft again, on the same server as before.",
        )
    if change is None or drift is None:
        return (
            "INCONCLUSIVE",
            "There are too few prompts to estimate the noise.",
            "Measure more prompts.",
        )
    if not drift.lower <= 0 <= drift.upper:
        return (
            "ANOMALOUS",
            f"The server changed between the two measurements: {figures}, and chance does that in"
            " fewer than one of a hundred pairs of runs.",
            "Look for a change of the server's load, version or settings, then measure all runs"
            " again in turns.",
        )
    if (change.upper - change.lower) / 2 >= -math.log1p(-limit):
        return (
            "INCONCLUSIVE",
            f"The server's noise is as large as the limit of {limit:.2%}: {figures}.",
            "Measure more prompts or longer outputs, or keep fewer requests in flight.",
        )
    return (
        "PASS",
        f"The server's noise is smaller than the limit of {limit:.2%}: {figures}.",
        None,
    )
