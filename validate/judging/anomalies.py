"""What the gate knows beside the counts, and which figures it does not believe.

A verdict is about quantization only if everything else worked: the baseline as it does elsewhere,
on the features that it was trained to read. Figures that say otherwise are ANOMALOUS, never PASS.
"""

from dataclasses import dataclass

from ...calibration.traces.head_agreement import MIN_AGREEMENT
from ..counting.draft_counts import DraftCounts
from ..errors import GateError
from .policy import Policy

EXPECTED_WITHIN = 0.05
"""Relative difference up to which `--expect-baseline` confirms a measured acceptance length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What was looked at before the two drafts were replayed.

    Attributes:
        baseline_sha256, candidate_sha256: identity of the tensors of each draft; None = not known.
        head_agreement: see `calibration.head_agreement`; None where it cannot be had.
        expected_baseline: mean acceptance length that the baseline has elsewhere with this K, in
            (1, K + 1]; None = not said.
        unrelated: the candidate is on purpose not the baseline quantized.
        unrecorded: no record says how the candidate's folder was quantized.
        taught: the target taught the candidate and not the baseline: a gain may be large.
        algorithm_to_try: with which the candidate may lose less, by its name on the command line;
            None = none is known.
        warnings: sentences without a full stop, for the verdict.
    """

    baseline_sha256: str | None = None
    candidate_sha256: str | None = None
    head_agreement: float | None = None
    expected_baseline: float | None = None
    unrelated: bool = False
    unrecorded: bool = False
    taught: bool = False
    algorithm_to_try: str | None = None
    warnings: tuple[str, ...] = ()


NO_BACKGROUND = Background()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Why figures are not believed, and what to do; one sentence each."""

    reason: str
    action: str


def check_expected_baseline(expected: float | None, num_draft_tokens: int) -> None:
    """Check what `--expect-baseline` says.

    Raises:
        GateError: it is no acceptance length.
    """
    if expected is not None and not 1 < expected <= num_draft_tokens + 1:
        raise GateError(
            "--expect-baseline",
            f"expected a mean acceptance length in (1, {num_draft_tokens + 1}] for K ="
            f" {num_draft_tokens}, got {expected}",
            fix="give the acceptance length that the BF16 draft has with this K",
        )


def min_baseline_length(baseline: DraftCounts, policy: Policy) -> float:
    """Shortest mean acceptance length that a working baseline has: 1 + a + a^2 + ... + a^K.

    Drawn text is harder to guess: a draft that proposes its most likely token is right at best as
    often as that token is drawn, which is at least the mean probability of the drawn tokens. So a
    is a share of that. (Drawn proposals lose less, as far as measured: 2.00 where the share gives
    1.15, on the shipped EAGLE-3 pair at temperature 0.8 and top-p 0.95.)
    """
    a = policy.min_step_acceptance * (baseline.text.mean_token_probability or 1.0)
    return sum(a**j for j in range(baseline.num_draft_tokens + 1))


def find_anomaly(
    baseline: DraftCounts, candidate: DraftCounts, policy: Policy, background: Background
) -> Anomaly | None:
    """The first reason not to believe the figures, or None."""
    return (
        _anomaly_of_head(background)
        or _anomaly_of_length("baseline", baseline, policy)
        or _anomaly_of_baseline(baseline, policy, background)
        or _anomaly_of_length("candidate", candidate, policy)
    )


def _anomaly_of_head(background: Background) -> Anomaly | None:
    agreement = background.head_agreement
    if agreement is None or agreement >= MIN_AGREEMENT:
        return None
    return Anomaly(
        reason=f"The target's head reproduces {agreement:.1%} of the recorded tokens from the"
        f" recorded features of its last layer, expected at least {MIN_AGREEMENT:.0%}: the traces"
        " are not of this target, or their features are not those of their tokens.",
        action="Record the traces again, and give the target that was recorded.",
    )


def _anomaly_of_baseline(
    baseline: DraftCounts, policy: Policy, background: Background
) -> Anomaly | None:
    """A known acceptance length settles it, else features and length must look right."""
    length, expected = baseline.counts.mean_acceptance_length, background.expected_baseline
    if expected is not None:
        if abs(length / expected - 1) <= EXPECTED_WITHIN:
            return None
        return Anomaly(
            reason=f"The baseline has a mean acceptance length of {length:.4f}, {expected:g} was"
            f" expected (--expect-baseline, within {EXPECTED_WITHIN:.0%}).",
            action="Check K, target and prompts, and the baseline's config.json.",
        )
    fault = baseline.text.fault
    if fault is not None:
        return Anomaly(
            reason=f"{fault[0].upper()}{fault[1:]}.",
            action="Record the traces again; if they are right, --expect-baseline AL with the"
            " acceptance length that the baseline has elsewhere confirms it.",
        )
    floor = min_baseline_length(baseline, policy)
    if length < floor:
        return Anomaly(
            reason=f"The baseline has a mean acceptance length of {length:.4f}; a draft that reads"
            f" what it was trained on has at least {floor:.2f} with K ="
            f" {baseline.num_draft_tokens}.",
            action="Check that the target is the one that the draft was trained for; if it"
            " is known to accept so little elsewhere, give the known figure: --expect-baseline AL.",
        )
    return None


def _anomaly_of_length(role: str, draft: DraftCounts, policy: Policy) -> Anomaly | None:
    length = draft.counts.mean_acceptance_length
    ceiling = policy.max_ceiling_share * (draft.num_draft_tokens + 1)
    if length < policy.min_acceptance_length:
        return Anomaly(
            reason=f"The {role} accepts next to nothing (mean acceptance length {length:.4f}): that"
            " is a broken load, not a loss of precision.",
            action="Check aux layers, rope, tensor names and scales: draftquant inspect, verify.",
        )
    if length > ceiling:
        return Anomaly(
            reason=f"The mean acceptance length of the {role}, {length:.4f}, is above"
            f" {ceiling:.4f}, {policy.max_ceiling_share:.0%} of the possible"
            f" {draft.num_draft_tokens + 1}.",
            action="Look for text that repeats itself, or for prompts that the draft was trained"
            " on.",
        )
    return None
