"""Simulated replays of two drafts whose true change of acceptance is known, for `gate`.

A prompt has its own acceptance probability p and its own length. A round accepts A tokens of K,
P(A >= j) = p^j. The two drafts decode most rounds alike; in the others each accepts on its own, and
the candidate with another p, by a shift of its logit that differs from prompt to prompt.

The figures are those of the shipped EAGLE-3 pair in INT4, K = 3: acceptance length 2.90 with a
standard deviation of 0.28 per prompt, 43 +- 5 rounds per prompt, and 0.035 for the standard
deviation of the per-prompt change (here 0.036, 0.29 and 43 +- 4).

The loss may also lie in some prompts, or be common to groups of them (one document, task or user).
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from draftquant.calibration.traces.feature_evidence import FeatureEvidence
from draftquant.calibration.traces.manifest import TargetIdentity
from draftquant.validate.counting.acceptance_counts import (
    CONTEXT_BINS,
    AcceptanceCounts,
    ContextCounts,
)
from draftquant.validate.counting.draft_counts import (
    DraftReplay,
    FirstStepAgreement,
    PromptReplay,
    TraceFigures,
)
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import expit, logit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_DRAFT_TOKENS = 3
MEDIAN_ROUNDS = 43
USUAL_LENGTH_SPREAD = 0.1
_ACCEPTANCE = (52, 14)  # of the beta distribution of p
_DIFFERING = 0.15  # share of the rounds that the drafts do not decode alike
_SHIFT_SPREAD = 0.3  # standard deviation of the shift between prompts
_POPULATION = 200_000  # prompts on which the true change is set

Loss = Literal["even", "exponential", "long", "a tenth", "a twentieth"]
"""Which prompts lose: all equally; each by an exponential draw; longer ones more; or only a tenth,
or a twentieth, of which the drafts decode most verify steps differently.
"""
_RARE: dict[Loss, float] = {"a tenth": 0.1, "a twentieth": 0.05}
_DIFFERING_IF_RARE = 0.9

_TRACES = TraceFigures(
    sha256="simulated",
    target=TargetIdentity(
        name="simulated", config_sha256="", weights_sha256="", num_layers=1, vocab_size=1
    ),
    temperature=0,
    sampling=None,
    mean_token_probability=None,
    repeated_8gram_share=0.0,
    num_near_duplicates=0,
    features=FeatureEvidence(repeats=0, constant=False, share={}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Recorded prompts under both drafts.

    Attributes:
        baseline, candidate: [N, K + 1] rounds by number of accepted tokens.
        prompts: [N] equal numbers are copies of one prompt. categories: [N].
        declared: [N] cluster that the prompt file names; none where it names none.
        seen: numbers of the prompts whose continuation made the candidate.
        contexts: [N] of each prompt the rounds of its context bins under both drafts, baseline
            first, each [bins, K + 1]; none where all rounds lie in the first bin.
    """

    baseline: Ints
    candidate: Ints
    prompts: Sequence[int]
    categories: Sequence[str]
    contexts: Sequence[tuple[Ints, Ints]] = ()
    declared: Sequence[str] = ()
    seen: Sequence[int] = ()

    def __add__(self, more: "Recorded") -> "Recorded":
        """Further prompts, different from these."""
        others = [prompt + len(self.prompts) for prompt in more.prompts]
        return Recorded(
            baseline=np.concatenate([self.baseline, more.baseline]),
            candidate=np.concatenate([self.candidate, more.candidate]),
            prompts=[*self.prompts, *others],
            categories=[*self.categories, *more.categories],
            contexts=[*self.contexts, *more.contexts],
        )

    def first(self, count: int) -> "Recorded":
        """The first `count` prompts."""
        return Recorded(
            baseline=self.baseline[:count],
            candidate=self.candidate[:count],
            prompts=self.prompts[:count],
            categories=self.categories[:count],
            contexts=self.contexts[:count],
        )

    def times(self, copies: int) -> "Recorded":
        """Every prompt recorded `copies` times."""
        return Recorded(
            baseline=np.tile(self.baseline, (copies, 1)),
            candidate=np.tile(self.candidate, (copies, 1)),
            prompts=list(self.prompts) * copies,
            categories=list(self.categories) * copies,
            contexts=list(self.contexts) * copies,
        )

    def as_groups(self, size: int) -> "Recorded":
        """Other prompts with the same counts, with `size` in a row declared as a cluster."""
        count = len(self.prompts)
        return dataclasses.replace(
            self, prompts=range(count), declared=[str(i // size) for i in range(count)]
        )

    def reciting(self, share: float, texts: int) -> "Recorded":
        """This share of the prompts repeats the last `texts` others in turn; each a cluster."""
        count = len(self.prompts)
        own = round(count * (1 - share))
        source = [i if i < own else i % texts - texts for i in range(count)]
        return dataclasses.replace(
            self,
            baseline=self.baseline[source],
            candidate=self.candidate[source],
            declared=[str(i) if i < own else f"text {i % texts}" for i in range(count)],
        )

    def each_as_one(self) -> "Recorded":
        """The same prompts without clusters."""
        return dataclasses.replace(self, declared=())

    def losing_most(self, share: float) -> "Recorded":
        """The same prompts, of which the candidate has seen those where it loses most."""
        rank = _changes(self).argsort()
        return dataclasses.replace(self, seen=rank[: round(share * len(rank))].tolist())

    def without_seen(self) -> "Recorded":
        """The other prompts alone."""
        rest = [i for i in range(len(self.prompts)) if i not in set(self.seen)]
        return Recorded(
            baseline=self.baseline[rest],
            candidate=self.candidate[rest],
            prompts=rest,
            categories=[self.categories[i] for i in rest],
        )

    def paired_by_counts(self) -> "Recorded":
        """Clusters of two that hide the spread: who lost most with who gained most."""
        rank = _changes(self).argsort().argsort()
        return dataclasses.replace(
            self, declared=[str(one) for one in np.minimum(rank, len(rank) - 1 - rank)]
        )


def _changes(recorded: Recorded) -> Floats:
    """[N] change of each prompt's acceptance length."""
    tokens = np.arange(1, NUM_DRAFT_TOKENS + 2)
    both = (recorded.baseline, recorded.candidate)
    before, after = (one @ tokens / one.sum(axis=1) for one in both)
    changes: Floats = after - before
    return changes


def record(
    generator: np.random.Generator,
    num_prompts: int,
    change: float,
    *,
    length_spread: float = USUAL_LENGTH_SPREAD,
    category: str = "all",
    loss: Loss = "even",
    group: int = 1,
) -> Recorded:
    """Distinct prompts, drawn from a population in which the candidate changed by `change`."""
    drawn = _prompts(generator, num_prompts, length_spread, loss, group)
    rounds, accepted = drawn.rounds, drawn.accepted
    shift = drawn.shift + true_shift(change, length_spread, loss, group) * drawn.weight
    own = generator.binomial(rounds, drawn.differing)
    alike = generator.multinomial(rounds - own, _shares(accepted))
    return Recorded(
        baseline=alike + generator.multinomial(own, _shares(accepted)),
        candidate=alike + generator.multinomial(own, _shares(expit(logit(accepted) + shift))),
        prompts=range(num_prompts),
        categories=[category] * num_prompts,
    )


def over_contexts(recorded: Sequence[Recorded]) -> Recorded:
    """The same prompts at several lengths: what each has in a context bin, the shortest first."""
    first = recorded[0]
    pairs = zip(
        np.stack([one.baseline for one in recorded], axis=1),
        np.stack([one.candidate for one in recorded], axis=1),
        strict=True,
    )
    return dataclasses.replace(
        first,
        baseline=np.sum([one.baseline for one in recorded], axis=0),
        candidate=np.sum([one.candidate for one in recorded], axis=0),
        contexts=list(pairs),
    )


@functools.cache
def true_shift(change: float, length_spread: float, loss: Loss = "even", group: int = 1) -> float:
    """The mean shift of the logit of p with which the population changes by `change`."""
    drawn = _prompts(np.random.default_rng(0), _POPULATION, length_spread, loss, group)
    lengths = _mean_length(drawn.accepted)
    before = (drawn.rounds * lengths).sum()

    def excess(mean: float) -> float:
        own = _mean_length(expit(logit(drawn.accepted) + drawn.shift + mean * drawn.weight))
        moved = drawn.rounds * drawn.differing * (own - lengths)
        return float(moved.sum() / before - change)

    return float(optimize.brentq(excess, -8.0, 8.0))


def replays(recorded: Recorded) -> tuple[DraftReplay, DraftReplay]:
    """As `replay_drafts` returns them."""
    return (
        _replay("baseline", recorded, recorded.baseline, [one for one, _ in recorded.contexts]),
        _replay("candidate", recorded, recorded.candidate, [one for _, one in recorded.contexts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Prompts as they are drawn.

    Attributes:
        rounds: [N]. accepted: [N] p. shift: [N] its deviation from the mean.
        weight: [N] of the mean shift in each prompt. differing: [N] share of rounds that the drafts
            do not decode alike.
    """

    rounds: Ints
    accepted: Floats
    shift: Floats
    weight: Floats
    differing: Floats


def _prompts(
    generator: np.random.Generator, count: int, length_spread: float, loss: Loss, group: int
) -> _Drawn:
    deviation = generator.standard_normal(count)
    length = MEDIAN_ROUNDS * np.exp(length_spread * deviation)
    accepted = generator.beta(*_ACCEPTANCE, count)
    shift = _SHIFT_SPREAD * generator.standard_normal(count)
    if group > 1:
        common = generator.standard_normal(-(-count // group))
        spread = 2 * abs(true_shift(-0.01, length_spread))
        shift = shift + spread * np.repeat(common, group)[:count]
    weight = np.ones(count)
    if loss == "exponential":
        weight = generator.exponential(size=count)
    elif loss == "long":
        weight = np.maximum(0.0, 1 + 0.5 * deviation)
    elif loss in _RARE:
        weight = (generator.random(count) < _RARE[loss]).astype(np.float64)
    rare = loss in _RARE
    return _Drawn(
        rounds=np.maximum(1, np.round(length)).astype(np.int64),
        accepted=accepted,
        shift=shift,
        weight=weight,
        differing=np.where(rare & (weight > 0), _DIFFERING_IF_RARE, _DIFFERING),
    )


def _shares(accepted: Floats) -> Floats:
    """[N, K + 1] probabilities of accepting 0 .. K tokens: p^j - p^(j + 1), and p^K."""
    reached = accepted[:, None] ** np.arange(NUM_DRAFT_TOKENS + 2)
    reached[:, -1] = 0.0
    return reached[:, :-1] - reached[:, 1:]


def _mean_length(accepted: Floats) -> Floats:
    length: Floats = (accepted[:, None] ** np.arange(NUM_DRAFT_TOKENS + 1)).sum(axis=1)
    return length


def _replay(name: str, recorded: Recorded, histograms: Ints, by_bin: Sequence[Ints]) -> DraftReplay:
    counts = [AcceptanceCounts(histogram=tuple(row)) for row in histograms.tolist()]
    contexts = [
        ContextCounts.of_histograms(own.tolist(), NUM_DRAFT_TOKENS, CONTEXT_BINS.edges)
        for own in by_bin
    ] or [None] * len(counts)
    prompts = tuple(
        PromptReplay(
            id=str(number),
            category=category,
            prompt_sha256=str(prompt),
            counts=own,
            every_position=own,
            contexts=bins,
            cluster=cluster,
        )
        for number, (prompt, category, own, bins, cluster) in enumerate(
            zip(
                recorded.prompts,
                recorded.categories,
                counts,
                contexts,
                recorded.declared or [""] * len(counts),
                strict=True,
            )
        )
    )
    return DraftReplay(
        name=name,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        traces=_TRACES,
        prompts=prompts,
        first_step=FirstStepAgreement(
            num_rows=1, num_equal=1, num_only_reference_hits=0, num_only_this_hits=0
        ),
    )
