"""Whether speculative output is plain greedy output, except for numeric noise.

A verify step multiplies other shapes than a decode step does, so near ties may change places: at
the first difference of each prompt, the target's gap between its two most likely tokens shows
whether it is one, or whether an engine accepts what the target would not have written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from scipy import stats

from ...recipes.decode import ABOVE_0, AT_LEAST_1
from ...recipes.errors import ParityError
from ..judging.policy import Verdict
from ..measure.measurement import Measurement, RequestRecord, differences
from .finding import MIN_PROMPTS, ParityFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference of one prompt's two outputs; None = not known, or that output has ended.

    Attributes:
        gap: of the plain run's two most likely tokens there, in nats.
        drop: how far the other token's log-probability is below the plain one's, in nats.
        explained: the gap is within the allowed noise, and the other token is equally likely.
    """

    id: str
    category: str
    position: int
    plain_token: int | None
    other_token: int | None
    gap: float | None
    drop: float | None
    explained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDivergence:
    """One run compared with the plain one, up to each first difference; gaps are in nats."""

    name: str
    num_prompts: int
    num_distinct_prompts: int
    num_tokens: int
    max_gap: float
    divergences: tuple[Divergence, ...]

    @property
    def unexplained(self) -> tuple[Divergence, ...]:
        """The differences beyond noise."""
        return tuple(divergence for divergence in self.divergences if not divergence.explained)

    @property
    def identity_rate(self) -> float:
        """Share of prompts with equal outputs, in [0, 1]."""
        return 1 - len(self.divergences) / self.num_prompts

    @property
    def hazard(self) -> float:
        """Divergences per token that was still equal before it."""
        return len(self.divergences) / max(1, self.num_tokens)

    @property
    def largest_gap(self) -> float:
        """The largest gap that is known of a difference; 0 without any."""
        return max((d.gap for d in self.divergences if d.gap is not None), default=0.0)


def audit(plain: Measurement, other: Measurement, *, max_gap: float) -> RunDivergence:
    """Compare every prompt's output with the plain one, which has `top_gap`; `max_gap` in nats."""
    _check_comparable(plain, other)
    theirs = {record.id: record for record in other.records}
    divergences, tokens = [], 0
    for record in plain.records:
        divergence = _first_difference(record, theirs[record.id], max_gap)
        tokens += len(record.token_ids) if divergence is None else divergence.position + 1
        divergences += [] if divergence is None else [divergence]
    return RunDivergence(
        name=other.name,
        num_prompts=len(plain.records),
        num_distinct_prompts=len({record.prompt_sha256 for record in plain.records}),
        num_tokens=tokens,
        max_gap=max_gap,
        divergences=tuple(divergences),
    )


def _first_difference(
    plain: RequestRecord, other: RequestRecord, max_gap: float
) -> Divergence | None:
    ours, theirs = plain.token_ids, other.token_ids
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position == len(ours) == len(theirs) and plain.ended == other.ended:
        return None
    gap = plain.top_gap[position] if plain.top_gap and position < len(ours) else None
    drop = _drop(plain, other, position)
    # Noise may move the end of the text, but it cuts nothing off.
    cut_off = position == len(theirs) and other.ended == "length"
    near_tie = gap is not None and gap <= max_gap
    # Both servers' noise moves it, and the gap itself separates the two tokens.
    as_likely = drop is None or abs(drop) <= 2 * max_gap
    return Divergence(
        id=plain.id,
        category=plain.category,
        position=position,
        plain_token=ours[position] if position < len(ours) else None,
        other_token=theirs[position] if position < len(theirs) else None,
        gap=gap,
        drop=drop,
        explained=near_tie and as_likely and not cut_off,
    )


def _drop(plain: RequestRecord, other: RequestRecord, position: int) -> float | None:
    """A near tie explains the second most likely token, but no third one."""
    ours, theirs = plain.token_logprob or (), other.token_logprob or ()
    if position >= min(len(ours), len(theirs)):
        return None
    return ours[position] - theirs[position]


def check_settings(plain: Measurement, other: Measurement, wanted: str) -> str:
    """Refuse two runs with different settings; returns the place where both are wrong otherwise."""
    where = f"{plain.name}, {other.name}"
    if differing := differences(plain.setup, other.setup):
        raise ParityError(where, f"were measured with different settings: {'; '.join(differing)}",
                          fix=f"measure the same prompts, target, engine and {wanted}")  # fmt: skip
    return where


def _check_comparable(plain: Measurement, other: Measurement) -> None:
    where = check_settings(plain, other, "lengths")
    temperature = plain.setup.asked.temperature
    if temperature != 0:
        raise ParityError(
            where,
            f"outputs were drawn at temperature {temperature:g}: drawn text differs from run to"
            " run",
            fix="measure at temperature 0, or use 'parity sampled'",
        )
    keys = [{(r.id, r.prompt_sha256) for r in run.records} for run in (plain, other)]
    if keys[0] != keys[1] or not keys[0]:
        lacking = len(keys[0] ^ keys[1])
        count = lacking or "all"
        raise ParityError(
            where,
            f"{count} prompt(s) are not in both",
            fix="run the interrupted measurement again to its end",
        )
    if any(r.top_gap is None or len(r.top_gap) != len(r.token_ids) for r in plain.records):
        raise ParityError(
            plain.name,
            "does not say how far apart the two most likely tokens are",
            fix="measure the plain server with --top-logprobs 2",
        )


TYPICAL_NOISE, LARGEST_NOISE = 0.25, 0.5
"""Nats. A BF16 logit in [16, 32) is rounded to steps of 0.125, one in [32, 64) to steps of 0.25:
two of them that move by one step each change their gap by 0.25, or 0.5. The logits of small
targets are smaller, and so is their noise: 0.03 in the shipped pair served by vLLM 0.32."""

LEAST_NOISE = 0.0625
"""Nats: one step of a BF16 logit in [8, 16). Plain runs that part at exact ties show less."""

ENOUGH_NOISE = 5
"""Divergences of two plain runs that show how large noise is; twice their largest gap is allowed,
as a few do not show the largest."""

CONFIDENCE = 0.95


def divergence_findings(
    plain: Measurement,
    speculative: Sequence[Measurement],
    *,
    plain_again: Measurement | None = None,
    max_gap: float | None = None,
    max_hazard_ratio: float | None = None,
    min_prompts: int = MIN_PROMPTS,
) -> tuple[ParityFinding, ...]:
    """Audit speculative runs: noise must explain every divergence.

    Args:
        plain: greedy, without speculation, with `top_gap`.
        plain_again: the plain server at another concurrency: what noise does there.
        max_gap: nats up to which a difference is noise; None = what `plain_again` shows, else
            `TYPICAL_NOISE`.
        max_hazard_ratio: how many times as often, per token, speculation may diverge as noise does.
        min_prompts: distinct prompts; with fewer there is no PASS.
    """
    _check_options(max_gap, max_hazard_ratio, min_prompts, plain_again)
    _check_roles(plain, speculative, plain_again)
    again = None if plain_again is None else audit(plain, plain_again, max_gap=LARGEST_NOISE)
    if max_gap is None:
        max_gap = TYPICAL_NOISE
        if again is not None and len(again.divergences) >= ENOUGH_NOISE:
            max_gap = min(LARGEST_NOISE, max(LEAST_NOISE, 2 * again.largest_gap))
    findings = []
    for measured in speculative:
        run = audit(plain, measured, max_gap=max_gap)
        findings.append(_judged(run, measured, again, min_prompts))
        if again is not None:
            findings.append(_hazard_judged(run, again, max_hazard_ratio))
    return tuple(findings)


def _judged(
    run: RunDivergence, measured: Measurement, again: RunDivergence | None, min_prompts: int
) -> ParityFinding:
    unexplained = len(run.unexplained)
    equal = run.num_prompts - len(run.divergences)
    figures = (
        f"{equal} of {run.num_prompts} outputs are identical and {len(run.divergences)}"
        f" diverge, {unexplained} of them not at a near tie (the target's two most likely tokens"
        f" within {run.max_gap:g} nats)"
    )
    lossy = measured.setup.speculation.lossy if measured.setup.speculation else ()
    verdict: Verdict
    if lossy:
        verdict, reason = "ANOMALOUS", f"the server accepts lossily ({', '.join(lossy)}): {figures}"
    elif again is not None and again.unexplained:
        verdict = "ANOMALOUS"
        reason = (
            f"two plain runs diverge from each other ({again.name}) at a gap of more than"
            f" {LARGEST_NOISE:g} nats, which rounding cannot do, so that these runs show nothing"
            f" about speculation; {figures}"
        )
    elif unexplained:
        worst = max(run.unexplained, key=lambda d: d.gap or 0.0)
        verdict, reason = "FAIL", f"{figures}, such as {_named(worst)}"
    elif run.num_distinct_prompts < min_prompts:
        verdict = "INCONCLUSIVE"
        reason = f"{figures}; expected at least {min_prompts} distinct prompts (--min-prompts)"
    else:
        verdict, reason = "PASS", f"{figures} (largest gap {run.largest_gap:.3f})"
    return ParityFinding(
        check="divergence",
        what=f"{run.name}: unexplained divergences",
        estimate=unexplained,
        threshold=0,
        verdict=verdict,
        reason=f"{reason}.",
        details=tuple(_details(run, again)),
    )


def _hazard_judged(
    run: RunDivergence, again: RunDivergence, max_ratio: float | None
) -> ParityFinding:
    """Two Poisson rates: given their sum, one is binomial, with exact (Clopper-Pearson) bounds."""
    ours, theirs = len(run.divergences), len(again.divergences)
    exposure = again.num_tokens / max(1, run.num_tokens)

    def bound(confidence: float, a: int, b: int) -> float | None:
        share = float(stats.beta.ppf(confidence, a, b)) if min(a, b) else None
        return None if share is None else share / (1 - share) * exposure

    lower, upper = bound(1 - CONFIDENCE, ours, theirs + 1), bound(CONFIDENCE, ours + 1, theirs)
    figures = (
        f"{ours} divergences in {run.num_tokens:,} tokens with speculation, {theirs} in"
        f" {again.num_tokens:,} of the plain run against itself"
    )
    verdict: Verdict
    if max_ratio is None:
        verdict, why = "INCONCLUSIVE", "no threshold was given (--max-hazard-ratio)"
    elif lower is not None and lower > max_ratio:
        verdict, why = "FAIL", f"even the lower bound of their ratio, {lower:.2f}, is beyond"
    elif not ours or (upper is not None and upper <= max_ratio):
        verdict, why = "PASS", "which is no more often than allowed"
    else:
        verdict, why = "INCONCLUSIVE", "these prompts do not decide: measure more prompts"
    both = lower is not None and upper is not None
    return ParityFinding(
        check="divergence",
        what=f"{run.name}: hazard against the plain run's own",
        estimate=ours / theirs * exposure if theirs else None,
        lower=lower if both else None,
        upper=upper if both else None,
        confidence=CONFIDENCE if both else None,
        threshold=max_ratio,
        verdict=verdict,
        reason=f"{figures}: {why}.",
        details=({"lower": lower, "upper": upper},),
    )


_OF_AGAIN = ("name", "identity_rate", "hazard", "largest_gap")


def _details(run: RunDivergence, again: RunDivergence | None) -> Iterator[Mapping[str, object]]:
    yield {
        "prompts": run.num_prompts,
        "identity_rate": run.identity_rate,
        "tokens": run.num_tokens,
        "hazard": run.hazard,
        "max_gap": run.max_gap,
        "largest_gap": run.largest_gap,
        "plain_again": again and {key: getattr(again, key) for key in _OF_AGAIN},
    }
    yield from map(asdict, run.divergences)


def _named(parted: Divergence) -> str:
    gap = "of a gap that is not known" if parted.gap is None else f"a gap of {parted.gap:.3f}"
    return f"prompt {parted.id} at output token {parted.position} ({gap})"


def _check_roles(
    plain: Measurement, speculative: Sequence[Measurement], again: Measurement | None
) -> None:
    for run in (plain, *([again] if again else [])):
        if run.setup.speculation is not None:
            raise ParityError(
                run.name,
                "expected a server without a draft, but this one uses a draft",
                fix="give the plain run first, then speculative ones",
            )
    in_flight = plain.setup.asked.concurrency
    if again is not None and again.setup.asked.concurrency == in_flight:
        raise ParityError(
            again.name,
            f"was measured with {in_flight} requests in flight, as many as {plain.name}, so that"
            " both runs round alike and show no noise",
            fix="measure the plain server again with another --concurrency",
        )
    for run in speculative:
        if run.setup.speculation is None:
            raise ParityError(
                run.name,
                "expected a server with a draft, but this one uses none",
                fix="a second plain run is --plain-again",
            )


def _check_options(
    max_gap: float | None,
    max_hazard_ratio: float | None,
    min_prompts: int,
    again: Measurement | None,
) -> None:
    fix = f"leave it out for the default, {MIN_PROMPTS}"
    AT_LEAST_1.check(ParityError, "--min-prompts", min_prompts, fix=fix)
    if max_gap is not None and not 0 <= max_gap < float("inf"):
        raise ParityError("--max-gap", f"expected nats, at least 0, got {max_gap}",
                          fix=f"leave it out for the default, {TYPICAL_NOISE:g}")  # fmt: skip
    if max_hazard_ratio is None:
        return
    twice = "2 = twice as often as the plain run"
    ABOVE_0.check(ParityError, "--max-hazard-ratio", max_hazard_ratio, fix=twice)
    if again is None:
        raise ParityError(
            "--max-hazard-ratio",
            "needs a second plain run to compare with",
            fix="give --plain-again R, measured at another concurrency",
        )
