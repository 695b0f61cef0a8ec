"""The gate: may this quantized draft replace its baseline? One verdict, with its reason.

This module gathers the evidence and writes the report; `decision` has the rules of the verdict.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..counting.clusters import RecordedPair, distinct_prompts, recorded_pairs
from ..counting.draft_counts import REPLAYED, DraftCounts, Wording
from ..counting.draft_replay import DraftReplay, FirstStepAgreement, TraceFigures
from ..counting.estimand import CONVENTION, DraftSampling, estimand
from ..counting.paired_change import PairedChange, RequiredPrompts
from ..errors import GateError
from .anomalies import NO_BACKGROUND, Background, check_expected_baseline
from .categories import CategoryFigures, change_of, judge_categories
from .decision import Evidence, Verdict, decide
from .gate_warnings import caveats
from .interim_analysis import Look
from .policy import Policy, looser_than_release
from .served_figures import ServedFigures

EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}

MIN_ROUNDS_PER_PROMPT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """What was counted of one draft; fields as in `AcceptanceCounts`.

    Attributes:
        every_position_mean_acceptance_length: see `PromptReplay`; None of a draft that was served.
    """

    name: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_steps: float
    num_emitted_tokens: float
    histogram: tuple[float, ...]
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...]
    every_position_mean_acceptance_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """One recorded prompt, with a round at least under both drafts.

    Attributes:
        prompt_sha256, cluster: see `PromptCounts`.
        baseline, candidate: [K + 1] histograms, see `AcceptanceCounts`.
    """

    id: str
    category: str
    prompt_sha256: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """The verdict and everything that it rests on.

    Attributes:
        reason: one sentence. action: what to do about it, one way out a line; None for PASS.
        warnings: what a reader has to know beside the verdict, a sentence each.
        looser_than_release: what the policy in use allows and `release` does not.
        look: None for a single one. `change.confidence` is then the policy's.
        num_prompts: distinct prompts with at least one round. num_copies: recorded beyond the first
            of each. num_short_prompts: left out for being too short. num_clusters: of prompts that
            belong together, each summed and counted as one; None where nothing says it.
        change: None where the two drafts cannot be compared.
        required_num_prompts: where the prompts were too few.
        traces, first_step: of replays; None of drafts that were served.
        served: how two measurements were compared; None of replays.
        prompts: that were compared, in their order; none where the two drafts cannot be.
    """

    verdict: Verdict
    reason: str
    action: str | None
    warnings: tuple[str, ...]
    policy: Policy
    looser_than_release: tuple[str, ...]
    look: Look | None
    estimand: str
    convention: str
    num_draft_tokens: int
    draft_sampling: DraftSampling | None = None
    traces: TraceFigures | None = None
    background: Background
    num_prompts: int
    num_copies: int
    num_short_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    required_num_prompts: RequiredPrompts | None
    first_step: FirstStepAgreement | None = None
    categories: tuple[CategoryFigures, ...]
    served: ServedFigures | None = None
    prompts: tuple[PromptFigures, ...] = ()
    num_clusters: int | None = None

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS."""
        return EXIT_CODES[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON, finite numbers only, with `exit_code` and `relative_change`."""
        relative = self.change.relative_change if self.change else None
        return {
            "kind": "comparison",
            **dataclasses.asdict(self),
            "exit_code": self.exit_code,
            "relative_change": relative,
        }


def judge(
    baseline: DraftReplay,
    candidate: DraftReplay,
    policy: Policy,
    *,
    look: Look | None = None,
    background: Background = NO_BACKGROUND,
) -> GateReport:
    """Compare two replays of the same traces.

    Args:
        baseline: the draft as released (BF16).
        candidate: the quantized draft, replayed in the same call after the baseline.
        policy: the limits.
        look: which one of several planned looks at a growing set of prompts this is.
        background: what was looked at before; its warnings come first in the report.

    Raises:
        GateError: K leaves too few rounds per prompt, or what is expected of the baseline is no
            acceptance length.
    """
    report = judge_counts(
        baseline,
        candidate,
        policy,
        incomparable=mismatch(baseline, candidate),
        estimand=estimand(
            baseline.traces.temperature, baseline.traces.sampling, baseline.draft_sampling
        ),
        wording=REPLAYED,
        look=look,
        background=background,
    )
    return dataclasses.replace(
        report,
        draft_sampling=baseline.draft_sampling,
        traces=baseline.traces,
        baseline=draft_figures(baseline),
        candidate=draft_figures(candidate),
        first_step=candidate.first_step,
    )


def mismatch(baseline: DraftReplay, candidate: DraftReplay) -> str:
    """In what the two replays differ so that they cannot be compared; empty if in nothing."""
    if baseline.traces.sha256 != candidate.traces.sha256:
        return "the two drafts were replayed on different traces"
    if baseline.num_draft_tokens != candidate.num_draft_tokens:
        return (
            f"the two drafts drafted {baseline.num_draft_tokens} and"
            f" {candidate.num_draft_tokens} tokens per step"
        )
    if baseline.draft_sampling != candidate.draft_sampling:
        return "the two drafts chose their proposals in different ways"
    if _identities(baseline) != _identities(candidate):
        return "the two drafts were replayed on different prompts"
    return ""


def _identities(replay: DraftReplay) -> list[tuple[str, str]]:
    return [(prompt.id, prompt.prompt_sha256) for prompt in replay.prompts]


def judge_counts(
    baseline: DraftCounts,
    candidate: DraftCounts,
    policy: Policy,
    *,
    incomparable: str,
    estimand: str,
    wording: Wording,
    look: Look | None = None,
    background: Background = NO_BACKGROUND,
) -> GateReport:
    """Compare two drafts by their counts, wherever those come from.

    Args:
        baseline: the draft as released (BF16).
        candidate: the quantized draft, on the same prompts in the same order.
        policy: the limits.
        incomparable: see `Evidence`.
        estimand: what the acceptance length is of, in words.
        wording: of the verdict.
        look: see `judge`.
        background: see `judge`.

    Returns:
        Without what only replays have.

    Raises:
        GateError: as of `judge`.
    """
    check_expected_baseline(background.expected_baseline, baseline.num_draft_tokens)
    recorded = [] if incomparable else _recorded_pairs(baseline, candidate, wording)
    prompts = distinct_prompts(recorded)
    confidence = look.adjusted_confidence(policy.confidence) if look else policy.confidence
    evidence = Evidence(
        baseline=baseline,
        candidate=candidate,
        incomparable=incomparable,
        prompts=prompts,
        change=change_of(prompts, confidence),
        categories=judge_categories(recorded, policy, confidence),
        policy=policy,
        look=look,
        background=background,
        wording=wording,
    )
    decision = decide(evidence)
    num_prompts = len({one.prompt_sha256 for one, _ in recorded})
    num_copies = len(recorded) - num_prompts
    num_short = len(baseline.prompts) - len(recorded)
    warnings = caveats(
        evidence, num_prompts=num_prompts, num_copies=num_copies, num_short_prompts=num_short
    )
    return GateReport(
        verdict=decision.verdict,
        reason=decision.reason,
        action=decision.action,
        warnings=(*background.warnings, *warnings),
        policy=policy,
        looser_than_release=looser_than_release(policy),
        look=look,
        estimand=estimand,
        convention=CONVENTION,
        num_draft_tokens=baseline.num_draft_tokens,
        background=background,
        num_prompts=num_prompts,
        num_copies=num_copies,
        num_short_prompts=num_short,
        baseline=counted_figures(baseline),
        candidate=counted_figures(candidate),
        change=evidence.change,
        required_num_prompts=decision.required_num_prompts,
        categories=evidence.categories,
        prompts=tuple(map(_prompt_figures, recorded)),
        num_clusters=len(prompts),
    )


def draft_figures(replay: DraftReplay) -> DraftFigures:
    """The figures of one replayed draft, pooled over its prompts."""
    return dataclasses.replace(
        counted_figures(replay),
        every_position_mean_acceptance_length=replay.every_position.mean_acceptance_length,
    )


def counted_figures(draft: DraftCounts) -> DraftFigures:
    """The figures of one draft, pooled over its prompts; at least one has a round."""
    counts = draft.counts
    return DraftFigures(
        name=draft.name,
        mean_acceptance_length=counts.mean_acceptance_length,
        draft_acceptance_rate=counts.draft_acceptance_rate,
        num_steps=counts.num_steps,
        num_emitted_tokens=counts.num_emitted_tokens,
        histogram=counts.histogram,
        survival=counts.survival,
        conditional=counts.conditional,
    )


def _prompt_figures(pair: RecordedPair) -> PromptFigures:
    baseline, candidate = pair
    return PromptFigures(
        id=baseline.id,
        category=baseline.category,
        prompt_sha256=baseline.prompt_sha256,
        baseline=baseline.counts.histogram,
        candidate=candidate.counts.histogram,
        cluster=baseline.cluster,
    )


def _recorded_pairs(
    baseline: DraftCounts, candidate: DraftCounts, wording: Wording
) -> list[RecordedPair]:
    """The prompts that have at least one round; a replayed one has one for all drafts or for none.

    Raises:
        GateError: the baseline has too few rounds per prompt for its K.
    """
    average = baseline.counts.num_steps / len(baseline.prompts)
    if average < MIN_ROUNDS_PER_PROMPT:
        raise GateError(
            "--num-draft-tokens",
            f"K = {baseline.num_draft_tokens} leaves {average:.1f} rounds per prompt on average,"
            f" expected at least {MIN_ROUNDS_PER_PROMPT}",
            fix=wording.longer,
        )
    return recorded_pairs(baseline, candidate)
