"""Counts in, numbers out: acceptance figures of one draft, in total and by context bin.

A context bin is a range of tokens before a verify step: those of the prompt, and those of the
output, including the token that the step begins with. A bin includes its lower bound.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from ...calibration.passes import DraftSampling
from ...calibration.traces.manifest import Sampling

_NGRAM_ORDER = 8
Verification = Literal["standard", "block"]
"""How drawn proposals are verified: one by one, or as a block (arXiv 2403.10444)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """[K + 1] steps by accepted draft tokens, without the bonus; expected counts are fractional.

    Add counts; never average averages.
    """

    histogram: tuple[float, ...]

    @classmethod
    def of(cls, accepted: Sequence[int], num_draft_tokens: int) -> "AcceptanceCounts":
        """Count verify steps by how many draft tokens each accepted."""
        return cls(histogram=tuple(accepted.count(j) for j in range(num_draft_tokens + 1)))

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip(self.histogram, other.histogram, strict=True)
        return AcceptanceCounts(histogram=tuple(a + b for a, b in pairs))

    @property
    def num_draft_tokens(self) -> int:
        """K, the tokens proposed in every step."""
        return len(self.histogram) - 1

    @property
    def num_steps(self) -> float:
        """Number of verify steps."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> float:
        """Accepted draft tokens of all steps, without bonus tokens."""
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def num_emitted_tokens(self) -> float:
        """Accepted draft tokens and one bonus token per step."""
        return self.num_steps + self.num_accepted_draft_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps, pooled, in [1, K + 1]; needs at least one step."""
        return 1 + self.num_accepted_draft_tokens / self.num_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens, in [0, 1]; needs at least one step."""
        return self.num_accepted_draft_tokens / (self.num_steps * self.num_draft_tokens)

    @property
    def survival(self) -> tuple[float, ...]:
        """[K] share of all steps that accepted at least j = 1 .. K draft tokens."""
        return tuple(reached / self.num_steps for reached in self._reached()[1:])

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """[K] share of the steps with j - 1 accepted tokens that also accepted token j."""
        reached = self._reached()
        return tuple(after / before if before else None for before, after in pairwise(reached))

    def _reached(self) -> list[float]:
        """[K + 1] number of steps that accepted at least 0 .. K draft tokens."""
        return [sum(self.histogram[j:]) for j in range(len(self.histogram))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """Identifies a prompt; the hash is of its token ids, for a later turn of the first turn's."""

    id: str
    category: str
    prompt_sha256: str

    @property
    def identity(self) -> tuple[str, str]:
        """What must be equal for two drafts to have been counted on the same prompt."""
        return self.id, self.prompt_sha256


def pooled(counts: Iterable[AcceptanceCounts], num_draft_tokens: int) -> AcceptanceCounts:
    """The sum of counts, zero steps for none."""
    none: tuple[float, ...] = (0,) * (num_draft_tokens + 1)
    columns = zip(none, *(c.histogram for c in counts), strict=True)
    return AcceptanceCounts(histogram=tuple(map(sum, columns)))


def repeated_ngram_share(continuations: Iterable[Sequence[int]]) -> float:
    """Share of 8-grams, in [0, 1), that occurred earlier in a text: loops are easy to draft."""
    total = distinct = 0
    for tokens in continuations:
        last = len(tokens) - _NGRAM_ORDER
        ngrams = [tuple(tokens[i : i + _NGRAM_ORDER]) for i in range(last + 1)]
        total += len(ngrams)
        distinct += len(set(ngrams))
    return 1 - distinct / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBins:
    """Bins between ascending edges; one bin lies before the first edge, another after the last."""

    edges: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.edges) + 1

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all bins, the shortest context first: 0-1k, 1k-4k, 64k+."""
        bounds = [_short(edge) for edge in (0, *self.edges)]
        return (*(f"{lower}-{upper}" for lower, upper in pairwise(bounds)), f"{bounds[-1]}+")

    def index(self, tokens_before: int) -> int:
        """The bin of a verify step with `tokens_before` tokens before it."""
        return bisect_right(self.edges, tokens_before)

    def slices(self, first: int, number: int) -> list[slice]:
        """The slice in each bin of `number` places with `first`, first + 1, .. tokens before."""
        inside = (min(max(edge - first, 0), number) for edge in self.edges)
        return [slice(start, end) for start, end in pairwise((0, *inside, number))]

    def problem(self) -> str:
        """Why these are not edges; empty if they are."""
        if len(self.edges) <= MOST_EDGES and all(a < b for a, b in pairwise((0, *self.edges))):
            return ""
        return f"expected at most {MOST_EDGES} ascending numbers of tokens above 0"


CONTEXT_BINS = ContextBins(edges=(1024, 4096, 16384, 65536))
"""The edges unless others are asked for."""
MOST_EDGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """The verify steps of one prompt by context bin; zero steps where none began."""

    bins: ContextBins
    counts: tuple[AcceptanceCounts, ...]

    @classmethod
    def of_steps(
        cls, accepted: Sequence[int], first: int, num_draft_tokens: int, bins: ContextBins
    ) -> "ContextCounts":
        """Bin consecutive verify steps; `first` tokens come before the first one."""
        by_bin: list[list[int]] = [[] for _ in range(len(bins))]
        places = accumulate((n + 1 for n in accepted), initial=first)
        for number, place in zip(accepted, places, strict=False):
            by_bin[bins.index(place)].append(number)
        counts = tuple(AcceptanceCounts.of(steps, num_draft_tokens) for steps in by_bin)
        return cls(bins=bins, counts=counts)

    @classmethod
    def of_histograms(
        cls, histograms: Sequence[Sequence[float]], num_draft_tokens: int, edges: Sequence[int]
    ) -> "ContextCounts | None":
        """Read from a file, which leaves out the empty bins at the end; None where it has none."""
        if not histograms:
            return None
        bins = ContextBins(edges=tuple(edges))
        nothing = (0.0,) * (num_draft_tokens + 1)
        rest = [nothing] * (len(bins) - len(histograms))
        counts = tuple(AcceptanceCounts(histogram=tuple(h)) for h in (*histograms, *rest))
        return cls(bins=bins, counts=counts)

    @property
    def histograms(self) -> tuple[tuple[float, ...], ...]:
        """[bins, K + 1], without the empty bins at the end; at least one."""
        last = max((i for i, c in enumerate(self.counts) if c.num_steps), default=0)
        return tuple(c.histogram for c in self.counts[: last + 1])


def _short(tokens: int) -> str:
    """1024 as 1k; a number that is not a multiple of 1024 stays as it is."""
    thousands, rest = divmod(tokens, 1024)
    return str(tokens) if rest or not thousands else f"{thousands}k"


CONVENTION = "accepted draft tokens + 1 bonus token per verify step, pooled; prefill not counted"


def estimand(temperature: float, sampling: Sampling | None, draft_sampling: DraftSampling) -> str:
    """What is counted on recorded text, in words; `sampling` None = it was continued greedily."""
    counted = "speculative decoding of recorded traces, verify steps whose outcome is fully known"
    if sampling is None:
        return f"greedy {counted}"
    drawn = f"temperature {temperature:g}"
    if sampling.top_p < 1:
        drawn += f", top-p {sampling.top_p:g}"
    if sampling.top_k:
        drawn += f", top-k {sampling.top_k}"
    proposals = {
        "greedy": "proposals are the draft's most likely tokens",
        "probabilistic": "expected over proposals that are drawn at that temperature",
        "block": "expected over proposals that are drawn at that temperature, verified as a block",
    }
    return f"sampled ({drawn}) {counted}; {proposals[draft_sampling]}"
