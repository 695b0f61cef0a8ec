"""Two measurements, prompt by prompt: may they be compared, and what did each draft accept."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...recipes.brief import apart as told_apart
from ...recipes.errors import GateError
from ..counting.acceptance_counts import (
    AcceptanceCounts,
    ContextCounts,
    pooled,
    repeated_ngram_share,
)
from ..counting.draft_counts import CountedDraft, PromptCounts, TextFigures
from ..counting.paired_change import PairedChange
from ..judging.categories import widest_change
from ..judging.figures import ServedFigures
from ..measure.measurement import Measurement, differences
from .common_steps import PairedOutputs, num_unwritten, pair_outputs, whole_counts

CountsPair = tuple[AcceptanceCounts, AcceptanceCounts]
Contexts = Sequence[ContextCounts | None]
MOST_UNDRAFTED = 0.01
"""Most share of a run's steps without a draft at which its verify steps represent its text."""
MOST_UNDRAFTED_APART = 0.001
"""The same, between the two runs. Steps that accept nothing and are left out make the acceptance
length longer by less than their share: a tenth of what `release` allows to be lost."""
MOST_PARTING = 0.05
"""Chance that two greedy outputs part at a token. A target parts from itself only at near ties:
at 0.2 % of the tokens where it was measured, and 1 to 2 % where it is unsure everywhere."""
MOST_PARTING_OF_PRECISIONS = 0.25
"""The same for one target in two precisions. FP4 weights part at 6 % on the shipped targets; an
unrelated target at half of the tokens and more."""
_PRECISIONS = ("quantization", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPair:
    """Two measurements side by side.

    Attributes:
        incomparable: why no draft can be judged by them; "" = they can be compared.
        baseline, candidate: by weighted verify steps; by all of them where it is not "".
        outputs: of every prompt; none where the setups forbid it.
        apart: in what the servers differ, if one draft ran on both and they are compared.
    """

    measurements: tuple[Measurement, Measurement]
    incomparable: str
    baseline: CountedDraft
    candidate: CountedDraft
    outputs: tuple[PairedOutputs, ...]
    apart: tuple[str, ...]

    def change(self, confidence: float) -> PairedChange | None:
        """The change by weighted steps, over distinct prompts; None where there are too few."""
        if self.incomparable:
            return None
        prompts = self.baseline.prompts
        both = zip(prompts, self.candidate.prompts, strict=True)
        return _change(prompts, ((b.counts, q.counts) for b, q in both), confidence)

    def figures(self, confidence: float) -> ServedFigures:
        """Figures besides those of the two drafts."""
        baseline, candidate = self.measurements
        servers = [measurement.setup.server for measurement in self.measurements]
        engine, version, model = (
            " and ".join(dict.fromkeys(getattr(server, key) for server in servers))
            for key in ("engine", "version", "model")
        )
        return figures_of(
            self.outputs,
            self.baseline.prompts,
            confidence,
            engine=engine,
            version=version,
            model=model,
            concurrency=(baseline.setup.asked.concurrency, candidate.setup.asked.concurrency),
            estimator="weighted rounds" if any(o.placed for o in self.outputs) else "whole outputs",
            baseline_mean_acceptance_length=_served_length(baseline, self.baseline),
            candidate_mean_acceptance_length=_served_length(candidate, self.candidate),
            repeated_8gram_share=repeated_ngram_share(r.token_ids for r in baseline.records),
            mean_token_probability=self.baseline.text.mean_token_probability,
            num_near_duplicates=self.baseline.text.num_near_duplicates,
            verification=baseline.setup.verification,
            apart=self.apart,
        )


def figures_of(
    outputs: Sequence[PairedOutputs],
    prompts: Sequence[PromptCounts],
    confidence: float,
    **known: Any,
) -> ServedFigures:
    """Figures of paired outputs, with what is `known` of their servers."""
    tokens = sum(sum(output.num_tokens) for output in outputs)
    whole = ((o.baseline.whole, o.candidate.whole) for o in outputs)
    common = ((o.baseline.common, o.candidate.common) for o in outputs)
    return ServedFigures(
        identical_share=_share(sum(output.identical for output in outputs), len(outputs)),
        common_share=_share(2 * sum(output.num_common for output in outputs), tokens),
        whole_change=_change(prompts, whole, confidence),
        common_change=_change(prompts, common, confidence),
        **known,
    )


def _change(
    prompts: Sequence[PromptCounts], counts: Iterable[CountsPair], confidence: float
) -> PairedChange | None:
    recorded = [
        (recounted(prompt, first), recounted(prompt, second))
        for prompt, (first, second) in zip(prompts, counts, strict=False)
        if first.num_steps and second.num_steps
    ]
    return widest_change(recorded, confidence)


def recounted(prompt: PromptCounts, counts: AcceptanceCounts) -> PromptCounts:
    """The prompt in its clusters, with other counts."""
    return PromptCounts.of(prompt, counts, prompt.cluster, prompt.alike)


def pair_measurements(
    baseline: Measurement, candidate: Measurement, apart: tuple[str, ...] = ()
) -> ServedPair:
    """Put two measurements side by side: the BF16 draft's first, or servers that are `apart`.

    Raises:
        GateError: both are the same one, neither server drafted, or one has no verify step.
    """
    both = (baseline, candidate)
    if baseline.records == candidate.records:
        raise GateError(
            candidate.name,
            f"is the same measurement as {baseline.name}: even all times are equal",
            fix="give two runs, the BF16 draft's first",
        )
    sizes = [_num_draft_tokens(run) for run in both]
    depth = sizes[0] or sizes[1]
    if not depth:
        raise GateError(
            f"{baseline.name} and {candidate.name}",
            "neither was measured with a draft",
            fix="measure servers that draft",
        )
    counts = [
        [whole_counts(record, size or depth) for record in run.records]
        for run, size in zip(both, sizes, strict=True)
    ]
    for run, run_counts in zip(both, counts, strict=True):
        if not any(each.num_steps for each in run_counts):
            raise GateError(
                run.name,
                "has no verify step: all of its outputs are one token long",
                fix="ask for longer outputs (measure --max-new-tokens)",
            )
    incomparable = incomparability(baseline, candidate, of_servers=bool(apart))
    outputs = tuple[PairedOutputs, ...]()
    contexts: list[Contexts] = [[None] * len(run.records) for run in both]
    if not incomparable:
        greedy = not baseline.setup.asked.temperature
        records = zip(baseline.records, candidate.records, strict=True)
        outputs = tuple(pair_outputs(*pair, depth, greedy=greedy) for pair in records)
        incomparable = unaccounted([
            (run.name, [num_unwritten(record, depth) for record in run.records], run_counts)
            for run, run_counts in zip(both, counts, strict=True)
        ])  # fmt: skip
        if greedy and not incomparable:
            parted = sum(not output.identical for output in outputs)
            keys = [difference.partition(":")[0] for difference in apart]
            most = MOST_PARTING
            if any(key.endswith(_PRECISIONS) for key in keys):
                most = MOST_PARTING_OF_PRECISIONS
            incomparable = other_target(parted, sum(output.num_common for output in outputs), most)
    if not incomparable:
        weighted = [output.weighted() for output in outputs]
        counts = [[pair[side] for pair in weighted] for side in (0, 1)]
        contexts = [[o.contexts and o.contexts[side] for o in outputs] for side in (0, 1)]
    drafts = [
        _served_draft(run, _name(run, apart), size or depth, run_counts, by_bin)
        for run, size, run_counts, by_bin in zip(both, sizes, counts, contexts, strict=True)
    ]
    return ServedPair(
        measurements=both,
        incomparable=incomparable,
        baseline=drafts[0],
        candidate=drafts[1],
        outputs=outputs,
        apart=apart,
    )


def incomparability(
    baseline: Measurement, candidate: Measurement, *, of_servers: bool = False
) -> str:
    """The difference that forbids to compare drafts, or servers; empty if there is none."""
    for run in (baseline, candidate):
        if run.setup.speculation is None:
            return f"{run.name} was measured without a draft"
        if run.setup.speculation.lossy:
            settings = ", ".join(run.setup.speculation.lossy)
            return (
                f"the server of {run.name} accepts tokens that its target would not have written"
                f" ({settings})"
            )
    sizes = [_num_draft_tokens(run) for run in (baseline, candidate)]
    if difference := unequal(
        sizes, differences(baseline.setup, candidate.setup, of_servers=of_servers)
    ):
        return difference
    prompts = [[(r.id, r.prompt_sha256) for r in run.records] for run in (baseline, candidate)]
    if prompts[0] != prompts[1]:
        return "the two runs hold different prompts"
    return ""


def unequal(sizes: Sequence[int], differing: Iterable[str]) -> str:
    """The K, or else the settings, in which two runs differ; empty if none."""
    if sizes[0] != sizes[1]:
        return f"the two runs drafted {sizes[0]} and {sizes[1]} tokens per verify step"
    settings = "; ".join(differing)
    return f"the two runs differ in settings that must be equal ({settings})" if settings else ""


def unaccounted(runs: Sequence[tuple[str, Sequence[int], Iterable[AcceptanceCounts]]]) -> str:
    """The run whose verify steps do not match its text; empty if both do.

    Each run has a name, and for each request the tokens that no verify step wrote, and counts.
    """
    names = [name for name, _, _ in runs]
    shares = [_undrafted_share(unwritten, counts) for _, unwritten, counts in runs]
    for name, share in zip(names, shares, strict=True):
        if share < 0:
            return f"the verify steps of {name} accept more than its outputs have tokens"
        if share > MOST_UNDRAFTED:
            told = told_apart(share, MOST_UNDRAFTED, ".1%")
            return (
                f"{told} of the steps that wrote the outputs of {name} are no verify steps: its"
                f" server drafted nothing there, or did not report it ({MOST_UNDRAFTED:.0%} may be"
                " missing)"
            )
    if abs(shares[0] - shares[1]) > MOST_UNDRAFTED_APART:
        return (
            f"{shares[0]:.2%} of the steps that wrote the outputs of {names[0]} are no verify"
            f" steps, and {shares[1]:.2%} of {names[1]}: one server drafted less often"
        )
    return ""


def _undrafted_share(unwritten: Sequence[int], counts: Iterable[AcceptanceCounts]) -> float:
    """Share of steps after first tokens that are not verify steps; below 0 = too many are."""
    if min(unwritten) < 0:
        return -1.0
    steps = sum(c.num_steps for c in counts)
    return sum(unwritten) / (sum(unwritten) + steps) if any(unwritten) else 0.0


def other_target(num_parted: int, num_common: float, most: float = MOST_PARTING) -> str:
    """A warning that outputs part far too often for one target, after that many common tokens."""
    chance = _share(num_parted, num_parted + num_common)
    if chance <= most:
        return ""
    told = told_apart(chance, most, ".1%")
    return (
        f"the two targets differ: greedy outputs diverge at {told} of the tokens at which they"
        f" could, and near ties of one target explain {most:.0%} at most"
    )


def _name(measurement: Measurement, apart: Sequence[str]) -> str:
    server = measurement.setup.server
    return f"{measurement.name} ({server.engine} {server.version})" if apart else measurement.name


def _served_draft(
    measurement: Measurement,
    name: str,
    num_draft_tokens: int,
    counts: Sequence[AcceptanceCounts],
    contexts: Contexts,
) -> CountedDraft:
    each = zip(measurement.records, counts, contexts, strict=True)
    return CountedDraft(
        name=name,
        num_draft_tokens=num_draft_tokens,
        prompts=tuple(
            replace(
                PromptCounts.of(record, prompt_counts, record.cluster or ""),
                contexts=by_bin,
                repeated_8gram_share=repeated_ngram_share([record.token_ids]),
            )
            for record, prompt_counts, by_bin in each
        ),
        counts=pooled(counts, num_draft_tokens),
        text=TextFigures(
            mean_token_probability=_mean_token_probability(measurement),
            num_near_duplicates=num_same_outputs(
                (record.token_ids, record.prompt_sha256) for record in measurement.records
            ),
        ),
    )


def _num_draft_tokens(measurement: Measurement) -> int:
    """K; 0 = nothing is drafted."""
    speculation = measurement.setup.speculation
    return 0 if speculation is None else speculation.num_draft_tokens


def _served_length(measurement: Measurement, draft: CountedDraft) -> float:
    size = draft.num_draft_tokens
    counts = pooled((whole_counts(record, size) for record in measurement.records), size)
    return counts.mean_acceptance_length


def _mean_token_probability(measurement: Measurement) -> float | None:
    """Mean probability of drawn tokens, where the server reported it."""
    if not measurement.setup.asked.temperature:
        return None
    logprobs = [p for record in measurement.records for p in record.token_logprob or ()]
    return sum(map(math.exp, logprobs)) / len(logprobs) if logprobs else None


def num_same_outputs(outputs: Iterable[tuple[Hashable, str]]) -> int:
    """Distinct prompts that share their output with another; from prompts with outputs."""
    prompts = defaultdict(set)
    for output, prompt in outputs:
        prompts[output].add(prompt)
    return sum(len(alike) for alike in prompts.values() if len(alike) > 1)


def _share(part: int, whole: float) -> float:
    return part / whole if whole else 0.0
