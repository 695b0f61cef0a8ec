"""The gate: may this quantized draft replace its baseline? One verdict, with its reason.

This module gathers the evidence and writes the report; `decision` has the rules of the verdict.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from ...calibration.passes import DraftSampling
from ...calibration.traces.related_prompts import suggested_clusters
from ...recipes.brief import apart, percent
from ...recipes.errors import GateError
from ..counting.acceptance_counts import CONVENTION, estimand
from ..counting.draft_counts import (
    MOST_REPEATED,
    DraftCounts,
    DraftReplay,
    FirstStepAgreement,
    PromptCounts,
    RecordedPair,
    TraceFigures,
    context_edges,
    distinct_prompts,
    recorded_pairs,
)
from ..counting.paired_change import PairedChange, RequiredPrompts
from .advice import NO_BACKGROUND, Background, Evidence
from .categories import (
    MIN_PROMPTS_TO_SUSPECT,
    CategoryFigures,
    ContextBinFigures,
    Parts,
    change_of,
    judge_parts,
    widest_change,
)
from .decision import Decision, decide, whole_change, worse
from .figures import (
    MOST_DRAFT_TOKENS,
    DraftFigures,
    PromptFigures,
    ServedFigures,
    draft_figures,
    is_histogram,
    prompt_problem,
)
from .policy import EXIT_CODES, REPLAYED, Look, Policy, Verdict, Wording, looser_than_release
from .published import Published

MOST_NAMED = 20
"""Most categories that a sentence names."""


def report_warnings(evidence: Evidence) -> Iterator[str]:
    """What a reader must know besides the verdict, in sentences without a full stop."""
    num_prompts, num_short_prompts = evidence.num_prompts, evidence.num_short_prompts
    parts, least = evidence.parts, evidence.policy.min_category_prompts
    looser = looser_than_release(evidence.policy)
    if looser:
        yield f"the limits are looser than those of the policy 'release': {', '.join(looser)}"
    if num_short_prompts and evidence.prompts:
        verb, count = "is" if num_short_prompts == 1 else "are", len(evidence.baseline.prompts)
        yield (
            f"{num_short_prompts} of the {count} prompts {verb} left out, too short for a verify"
            " step"
        )
    if num_copies := len(evidence.recorded) - num_prompts:
        kind = "is a copy or a later turn" if num_copies == 1 else "are copies or later turns"
        yield f"{num_copies} of the prompts {kind} of others, and judged with them"
    alike = evidence.baseline.text.num_near_duplicates
    if len(evidence.prompts) < num_prompts:
        yield (
            "related prompts (near duplicates, turns of one conversation, or declared in the"
            " prompt file) are clusters and count as one each, so the sample is smaller by"
            f" {num_prompts - len(evidence.prompts)}"
        )
    elif alike:
        yield (
            f"{alike} distinct prompts hardly differ from others (the same beginning or the same"
            " continuation), so that the true sample is smaller than their number"
        )
    yield from _wider_of_two(evidence)
    named = [(p.id, p.category) for p in evidence.baseline.prompts if not p.cluster]
    if suggestion := suggested_clusters(named):
        yield suggestion
    if evidence.prompts and all(pair.baseline == pair.candidate for pair in evidence.prompts):
        yield (
            "both drafts accepted the same number of tokens on every prompt: the change of +0.00%"
            " is exact on these prompts"
        )
    yield from _unjudged(parts.categories, least)
    if small := [repr(part.category) for part in parts.context_bins if not part.outcome]:
        yield (
            f"the verify steps in {', '.join(small)} are of an effective sample size below {least}"
            " prompts and are not judged alone"
        )
    yield from _falls_with_context(parts.context_bins)
    recorded = evidence.recorded
    placeless = sum(None in (first.contexts, second.contexts) for first, second in recorded)
    if 0 < placeless < len(recorded):
        yield (
            f"no context bin counts {placeless} of the {len(recorded)} prompts: where their verify"
            " steps began is not known"
        )
    for part in parts.with_outcome("INCONCLUSIVE"):
        assert part.change is not None  # it has an outcome
        if -part.change.relative_change > part.max_relative_drop:
            kind = "" if part.is_context_bin else "category "
            yield (
                f"{kind}{part.category!r} lost more than its limit of"
                f" {part.max_relative_drop:.0%}, but that may be chance: record more prompts of"
                " it"
            )
    if (expected := evidence.background.expected_baseline) is not None:
        length = evidence.baseline.counts.mean_acceptance_length
        yield (
            f"whether the baseline's acceptance length, {length:.4f}, is that of right inputs was"
            f" decided by --expect-baseline {expected:g} alone"
        )
    if evidence.look:
        yield (
            f"this is planned interim analysis {evidence.look.number} of {evidence.look.total}"
            f" ({evidence.look.spending}): its bounds hold only if all of them were planned before"
            " the first, with equal numbers of prompts added each time"
        )


def _wider_of_two(evidence: Evidence) -> Iterator[str]:
    change = evidence.change
    if change and evidence.declared:
        declared_change = change_of(evidence.prompts, change.confidence)
        lower, upper = (
            "with" if getattr(declared_change, bound) == getattr(change, bound) else "without"
            for bound in ("lower", "upper")
        )
        yield (
            "declared clusters narrow no bound, so the wider of those with and without them count:"
            f" the lower one is that {lower}, the upper one that {upper} them"
        )


def _unjudged(categories: Sequence[CategoryFigures], min_prompts: int) -> Iterator[str]:
    small = [part.category for part in categories if not part.outcome]
    if not small:
        return
    named = ", ".join(small[:MOST_NAMED]) + (", ..." if len(small) > MOST_NAMED else "")
    which, verbs = (
        ("1 category has", "is") if len(small) == 1 else (f"{len(small)} categories have", "are")
    )
    yield (
        f"{which} fewer than {min_prompts} prompts, related ones counted once, and {verbs} not"
        f" judged alone: {named}"
    )


def _falls_with_context(bins: Sequence[ContextBinFigures]) -> Iterator[str]:
    """Warn where the baseline loses: both drafts may be equally bad."""
    told = [part for part in bins if part.num_prompts >= MIN_PROMPTS_TO_SUSPECT]
    best = max(told, key=lambda part: part.baseline_mean_acceptance_length, default=None)
    for part in told:
        length = part.baseline_mean_acceptance_length
        if best is not None and length - 1 < (best.baseline_mean_acceptance_length - 1) / 2:
            yield (
                f"the baseline itself accepts {part.baseline_mean_acceptance_length:.2f} in"
                f" {part.category!r} and {best.baseline_mean_acceptance_length:.2f} in"
                f" {best.category!r}: the draft was probably not trained at that length, whatever"
                " quantization does"
            )


MIN_STEPS_PER_PROMPT = 10


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GateReport(Published):
    """The verdict and all its evidence: the keys of a report, written and read.

    Attributes:
        verdict: PASS, FAIL, INCONCLUSIVE or ANOMALOUS.
        reason: why, in one sentence.
        action: what to do about it, one way out per line; None for PASS.
        warnings: what a reader must know besides the verdict, one sentence each.
        policy: the limits that were applied.
        looser_than_release: what these limits allow and those of `release` do not.
        look: which planned interim analysis this is; None for a single analysis. With one,
            `change.confidence` is adjusted, and the policy holds the confidence of the whole plan.
        estimand: what the acceptance length describes, in words.
        convention: how tokens are counted, in words.
        num_draft_tokens: tokens drafted per verify step (K).
        draft_sampling: how the drafts chose their proposals; None for served drafts.
        traces: facts about the replayed traces; None for served drafts.
        background: what was checked before the comparison.
        num_prompts: distinct prompts with at least one verify step.
        num_copies: prompts that were recorded again, and later turns of others.
        num_short_prompts: prompts that were left out because they are too short.
        baseline: the figures of the BF16 draft.
        candidate: the figures of the quantized draft.
        change: the relative change with its bounds; None where the drafts cannot be compared.
        change_without_seen: the same without the prompts of `background.seen_continuations`, where
            there are any: the worse of both verdicts counts.
        change_without_loops: the same without continuations of which more than a tenth of the
            8-grams are repeats, where each change lies beyond the bounds of the other.
        required_num_prompts: how many prompts would decide, where these were too few.
        first_step: how often both drafts propose the same first token; None for served drafts.
        categories: the same comparison in each category.
        context_bins: the same in each context bin, the shortest context first; none where all
            verify steps lie in one, or where their places are not known.
        served: how two measurements were compared; None for replayed drafts.
        prompts: the compared prompts in their order; empty where the drafts cannot be compared.
        num_clusters: groups of related prompts, each counted as one; None where none are declared.
        context_edges: edges of the context bins by which verify steps were also counted; none where
            the places of the steps are not known.
        exit_code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE or ANOMALOUS.
        relative_change: the relative change as a share: -0.01 is a loss of 1 %.
    """

    kind: Literal["comparison"] = "comparison"
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
    draft_sampling: DraftSampling | None
    traces: TraceFigures | None
    background: Background
    num_prompts: int
    num_copies: int
    num_short_prompts: int
    baseline: DraftFigures
    candidate: DraftFigures
    change: PairedChange | None
    required_num_prompts: RequiredPrompts | None
    first_step: FirstStepAgreement | None
    categories: tuple[CategoryFigures, ...]
    served: ServedFigures | None
    prompts: tuple[PromptFigures, ...]
    change_without_seen: PairedChange | None = None
    change_without_loops: PairedChange | None = None
    num_clusters: int | None = None
    context_edges: tuple[int, ...] = ()
    context_bins: tuple[ContextBinFigures, ...] = ()
    exit_code: int
    relative_change: float | None

    @property
    def parts(self) -> Parts:
        """What was judged besides the whole."""
        return Parts(categories=self.categories, context_bins=self.context_bins)

    @property
    def sample(self) -> str:
        """How many prompts were judged, related ones as one; and recorded: 95 (96 recorded)."""
        judged = self.num_prompts if self.num_clusters is None else self.num_clusters
        recorded = self.num_prompts + self.num_copies + self.num_short_prompts
        return f"{judged:,}" + (f" ({recorded:,} recorded)" if recorded != judged else "")

    def problem(self) -> str:
        """Which counts are invalid; empty if none: all other figures have to follow from them."""
        k = self.num_draft_tokens
        if not 1 <= k <= MOST_DRAFT_TOKENS:
            return f"num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {k}"
        for figures in (self.baseline, self.candidate):
            # Drafts that cannot be compared may each have used another K.
            most = k if self.prompts else max(1, len(figures.histogram) - 1)
            if not is_histogram(figures.histogram, most):
                return f"histogram: expected {most + 1} counts of verify steps"
        for prompt in self.prompts:
            add_up = self.served is None
            if problem := prompt_problem(prompt, k, self.context_edges, add_up=add_up):
                return f"prompts: {prompt.id!r}: {problem}"
        return ""

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON, finite numbers only."""
        return dataclasses.asdict(self)

    @override
    def brief(self) -> Mapping[str, object]:
        lengths = (self.baseline.mean_acceptance_length, self.candidate.mean_acceptance_length)
        change = self.change
        return {
            "verdict": self.verdict,
            "acceptance length": " -> ".join(f"{length:.4f}" for length in lengths),
            "change": percent(self.relative_change),
            "bounds": change and " to ".join(change.in_percent(self.policy.max_relative_drop)[1:]),
            "limit": f"-{self.policy.max_relative_drop:.2%}",
            "prompts": self.sample,
            "warnings": len(self.warnings) or None,
        }


def counted(report: GateReport, *, of_candidate: bool) -> list[PromptCounts]:
    """What was counted for each compared prompt under one of the two drafts."""
    edges = report.context_edges
    return [prompt.counts(edges, of_candidate=of_candidate) for prompt in report.prompts]


def judge(
    baseline: DraftReplay,
    candidate: DraftReplay,
    policy: Policy,
    *,
    look: Look | None = None,
    background: Background = NO_BACKGROUND,
) -> GateReport:
    """Compare two replays of the same traces, the baseline's and the candidate's of one call."""
    traces = baseline.traces
    report = judge_counts(
        baseline,
        candidate,
        policy,
        incomparable=mismatch(baseline, candidate),
        estimand=estimand(traces.temperature, traces.sampling, baseline.draft_sampling),
        wording=REPLAYED,
        look=look,
        background=background,
    )
    return dataclasses.replace(
        report,
        draft_sampling=baseline.draft_sampling,
        traces=traces,
        first_step=candidate.first_step,
    )


def mismatch(baseline: DraftReplay, candidate: DraftReplay) -> str:
    """The difference that makes two replays incomparable; empty if there is none."""
    depths = baseline.num_draft_tokens, candidate.num_draft_tokens
    if baseline.traces.sha256 != candidate.traces.sha256:
        return "the two drafts were replayed on different traces"
    if depths[0] != depths[1]:
        return f"the two drafts drafted {depths[0]} and {depths[1]} tokens per verify step"
    if baseline.draft_sampling != candidate.draft_sampling:
        return "the two drafts chose their proposals in different ways (--draft-sampling)"
    if [p.identity for p in baseline.prompts] != [p.identity for p in candidate.prompts]:
        return "the two drafts were replayed on different prompts"
    return ""


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
    """Compare two drafts by their counts; GateError: K leaves too few verify steps per prompt."""
    _check_expected(background.expected_baseline, baseline.num_draft_tokens)
    recorded = [] if incomparable else _recorded_pairs(baseline, candidate, wording)
    prompts = distinct_prompts(recorded)
    confidence = look.adjusted_confidence(policy.confidence) if look else policy.confidence
    evidence = Evidence(
        baseline=baseline,
        candidate=candidate,
        incomparable=incomparable,
        recorded=recorded,
        prompts=prompts,
        change=widest_change(recorded, confidence),
        parts=judge_parts(recorded, policy, confidence),
        policy=policy,
        look=look,
        background=background,
        wording=wording,
    )
    decision, unseen = decide(evidence), _without_seen(evidence, confidence)
    unlooped = _without_loops(evidence, confidence)
    if unseen is not None:
        decision = worse(decision, _of_the_rest(decide(unseen), evidence, unseen))
    return GateReport(
        verdict=decision.verdict,
        reason=decision.reason,
        action=decision.action,
        warnings=(
            *background.warnings,
            *report_warnings(evidence),
            *_of_loops(evidence, unlooped),
            *_both_ways(evidence, unseen),
        ),
        policy=policy,
        looser_than_release=looser_than_release(policy),
        look=look,
        estimand=estimand,
        convention=CONVENTION,
        num_draft_tokens=baseline.num_draft_tokens,
        draft_sampling=None,
        traces=None,
        background=background,
        num_prompts=evidence.num_prompts,
        num_copies=len(recorded) - evidence.num_prompts,
        num_short_prompts=evidence.num_short_prompts,
        baseline=draft_figures(baseline),
        candidate=draft_figures(candidate),
        change=evidence.change,
        change_without_seen=None if unseen is None else unseen.change,
        change_without_loops=unlooped,
        required_num_prompts=decision.required_num_prompts,
        first_step=None,
        categories=evidence.parts.categories,
        context_bins=evidence.parts.context_bins,
        served=None,
        prompts=tuple(PromptFigures.of(*pair) for pair in recorded),
        num_clusters=len(prompts),
        context_edges=context_edges(baseline.prompts),
        exit_code=EXIT_CODES[decision.verdict],
        relative_change=evidence.change.relative_change if evidence.change else None,
    )


def _without_loops(evidence: Evidence, confidence: float) -> PairedChange | None:
    """The change of the other continuations, where the estimates exclude each other; else None."""
    change = evidence.change
    rest = widest_change([pair for pair in evidence.recorded if not pair[0].loops], confidence)
    if change is None or rest is None or rest.num_prompts < MIN_PROMPTS_TO_SUSPECT:
        return None
    return rest if change.excludes(rest) and rest.excludes(change) else None


def _of_loops(evidence: Evidence, rest: PairedChange | None) -> Iterator[str]:
    if rest is not None:
        number = sum(prompt.loops for prompt, _ in evidence.recorded)
        yield (
            f"{number} of the {len(evidence.recorded)} continuations loop (more than"
            f" {MOST_REPEATED:.0%} of their 8-grams are repeats), and loops are easy to draft:"
            f" without them {whole_change(rest, evidence.policy.max_relative_drop)}; the verdict is"
            " that of all"
        )


def _without_seen(evidence: Evidence, confidence: float) -> Evidence | None:
    """The evidence of the other prompts; None where no continuation was seen."""
    seen = set(evidence.background.seen_continuations)
    rest = [pair for pair in evidence.recorded if pair[0].id not in seen]
    if len(rest) == len(evidence.recorded):
        return None
    return dataclasses.replace(
        evidence,
        recorded=rest,
        prompts=distinct_prompts(rest),
        change=widest_change(rest, confidence),
        parts=judge_parts(rest, evidence.policy, confidence),
    )


def _of_the_rest(decision: Decision, evidence: Evidence, unseen: Evidence) -> Decision:
    number = len(evidence.recorded) - len(unseen.recorded)
    what = f"Without the {number} prompts whose continuations made the candidate too: "
    return dataclasses.replace(decision, reason=what + decision.reason)


def _both_ways(evidence: Evidence, unseen: Evidence | None) -> Iterator[str]:
    if unseen is not None:
        number = len(evidence.recorded) - len(unseen.recorded)
        limit = evidence.policy.max_relative_drop
        changes = [c and whole_change(c, limit) for c in (evidence.change, unseen.change)]
        yield (
            f"the target's continuations of {number} of the {len(evidence.recorded)} prompts are"
            " among those that made the candidate; the worse of two verdicts counts: with these"
            f" prompts {changes[0]}, without them {changes[1]}"
        )


def _check_expected(expected: float | None, num_draft_tokens: int) -> None:
    if expected is not None and not 1 < expected <= num_draft_tokens + 1:
        longest = f"(1, {num_draft_tokens + 1}] for K = {num_draft_tokens}"
        what = f"expected a mean acceptance length in {longest}, got {expected}"
        fix = "give the acceptance length that the BF16 draft has with this K"
        raise GateError("--expect-baseline", what, fix=fix)


def _recorded_pairs(
    baseline: DraftCounts, candidate: DraftCounts, wording: Wording
) -> list[RecordedPair]:
    """The prompts with verify steps; GateError: K leaves too few of them on average."""
    k, average = baseline.num_draft_tokens, baseline.counts.num_steps / len(baseline.prompts)
    if average < MIN_STEPS_PER_PROMPT:
        told = apart(average, MIN_STEPS_PER_PROMPT, ".1f")
        what = f"K = {k} leaves {told} verify steps per prompt on average"
        what = f"{what}, expected at least {MIN_STEPS_PER_PROMPT}"
        raise GateError("--num-draft-tokens", what, fix=wording.longer)
    return recorded_pairs(baseline, candidate)
