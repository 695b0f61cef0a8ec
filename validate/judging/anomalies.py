"""What the gate knows beside the counts, and which figures are not those of a working pair.

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
        algorithm_to_try: with which the candidate may lose less, by its name on the command line;
            None = none is known. recipes_to_try: built-in ones, the nearest first.
        cut: the vocabulary of the candidate was cut. quantized: it is quantized, too or alone.
        not_compared: what makes two runs comparable and could not be compared, because files of
            another tool do not hold it: sentences without a full stop. No such run passes.
        to_compare: how those tools keep it, a sentence each.
        warnings: sentences without a full stop, for the verdict.
    """

    baseline_sha256: str | None = None
    candidate_sha256: str | None = None
    head_agreement: float | None = None
    expected_baseline: float | None = None
    unrelated: bool = False
    unrecorded: bool = False
    algorithm_to_try: str | None = None
    recipes_to_try: tuple[str, ...] = ()
    cut: bool = False
    quantized: bool = True
    not_compared: tuple[str, ...] = ()
    to_compare: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


NO_BACKGROUND = Background()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Why the figures cannot be right, and what to do; a sentence or two each."""

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
    """The first reason why the figures cannot be right, or None."""
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
        reason=f"The target's head reproduces only {agreement:.1%} of the recorded tokens from the"
        f" recorded features of its last layer, expected at least {MIN_AGREEMENT:.0%}. The traces"
        " were recorded from another target, or their features do not belong to their tokens.",
        action="Record the traces again, and give the same target to --target.",
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
            reason=f"The baseline has a mean acceptance length of {length:.4f}, but"
            f" --expect-baseline says {expected:g} (a difference of {EXPECTED_WITHIN:.0%} is"
            " allowed).",
            action="Check K, the target, the prompts, and the baseline's config.json.",
        )
    fault = baseline.text.fault
    if fault is not None:
        return Anomaly(
            reason=f"{fault[0].upper()}{fault[1:]}.",
            action="Record the traces again. If you know that they are right, confirm it with the"
            " acceptance length that the baseline has elsewhere: --expect-baseline AL.",
        )
    floor = min_baseline_length(baseline, policy)
    if length < floor:
        return Anomaly(
            reason=f"The baseline has a mean acceptance length of only {length:.4f}. With K ="
            f" {baseline.num_draft_tokens}, a draft whose inputs are those it was trained on has at"
            f" least {floor:.2f}.",
            action="Check that the draft was trained for this target. If the draft is known to"
            " accept so little elsewhere too, give the known figure: --expect-baseline AL.",
        )
    return None


def _anomaly_of_length(role: str, draft: DraftCounts, policy: Policy) -> Anomaly | None:
    length = draft.counts.mean_acceptance_length
    ceiling = policy.max_ceiling_share * (draft.num_draft_tokens + 1)
    if length < policy.min_acceptance_length:
        return Anomaly(
            reason=f"Almost no token of the {role} is accepted (mean acceptance length"
            f" {length:.4f}). A loss of precision does not do that; the draft was probably loaded"
            " wrongly.",
            action="Check target layers, rope, tensor names and scales with draftquant inspect and"
            " draftquant verify.",
        )
    if length > ceiling:
        return Anomaly(
            reason=f"The mean acceptance length of the {role}, {length:.4f}, is too close to the"
            f" maximum of {draft.num_draft_tokens + 1} (a working draft stays below"
            f" {ceiling:.4f}).",
            action="Look for text that repeats itself, and for prompts that the draft was trained"
            " on.",
        )
    return None
