"""Context bins: acceptance by how many tokens stand before a verify step.

A draft that loses nothing at 2,000 tokens may accept next to nothing at 20,000, and a mean over
both hides it. So verify steps are counted by ranges of tokens before them: those of the prompt, and
those of the output that were written, with the token that the step begins with. A step belongs to
the bin in which it begins; the lower bound of a bin belongs to it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .acceptance_counts import AcceptanceCounts, pooled

_THOUSAND = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBin:
    """One range of tokens before a verify step.

    Attributes:
        lower: included. upper: excluded; None = there is no end.
    """

    lower: int
    upper: int | None

    @property
    def label(self) -> str:
        """0-1k, 1k-4k, 64k+."""
        if self.upper is None:
            return f"{_short(self.lower)}+"
        return f"{_short(self.lower)}-{_short(self.upper)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBins:
    """The bins that verify steps are counted by.

    Attributes:
        edges: ascending; before the first lies one bin, from the last on another.
    """

    edges: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.edges) + 1

    @property
    def ranges(self) -> tuple[ContextBin, ...]:
        """Every bin, the shortest context first."""
        uppers = (*self.edges, None)
        return tuple(
            ContextBin(lower=lower, upper=upper)
            for lower, upper in zip((0, *self.edges), uppers, strict=True)
        )

    def index(self, tokens_before: int) -> int:
        """Of the bin of a verify step with so many tokens before it."""
        return bisect_right(self.edges, tokens_before)

    def slices(self, first: int, number: int) -> list[slice]:
        """Of `number` places with `first`, first + 1, .. tokens before them: those of each bin."""
        inside = (min(max(edge - first, 0), number) for edge in self.edges)
        return [slice(start, end) for start, end in pairwise((0, *inside, number))]

    def problem(self) -> str:
        """What is no list of edges; empty if nothing."""
        if len(self.edges) <= MOST_EDGES and all(a < b for a, b in pairwise((0, *self.edges))):
            return ""
        return f"expected at most {MOST_EDGES} ascending numbers of tokens above 0"


CONTEXT_BINS = ContextBins(edges=(1024, 4096, 16384, 65536))
"""What is counted where nothing else is asked for."""
MOST_EDGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """The verify steps of one prompt by context bin.

    Attributes:
        bins: that were counted by.
        counts: of each bin; zero steps where none began there.
    """

    bins: ContextBins
    counts: tuple[AcceptanceCounts, ...]

    @classmethod
    def of_steps(
        cls, accepted: Sequence[int], first: int, num_draft_tokens: int, bins: ContextBins
    ) -> "ContextCounts":
        """Of verify steps that follow one another without a gap.

        Args:
            accepted: draft tokens of every step in order.
            first: tokens before the first step.
        """
        by_bin: list[list[int]] = [[] for _ in range(len(bins))]
        places = accumulate((own + 1 for own in accepted), initial=first)
        for own, place in zip(accepted, places, strict=False):
            by_bin[bins.index(place)].append(own)
        counts = tuple(AcceptanceCounts.of(own, num_draft_tokens) for own in by_bin)
        return cls(bins=bins, counts=counts)

    @classmethod
    def of_histograms(
        cls, histograms: Sequence[Sequence[float]], num_draft_tokens: int, edges: Sequence[int]
    ) -> "ContextCounts | None":
        """What `histograms` says in a file, which leaves out the empty bins at the end.

        Returns:
            None where nothing is said.
        """
        if not histograms:
            return None
        bins = ContextBins(edges=tuple(edges))
        nothing = (0.0,) * (num_draft_tokens + 1)
        rest = [nothing] * (len(bins) - len(histograms))
        counts = tuple(AcceptanceCounts(histogram=tuple(own)) for own in (*histograms, *rest))
        return cls(bins=bins, counts=counts)

    @property
    def histograms(self) -> tuple[tuple[float, ...], ...]:
        """[bins, K + 1], without the empty bins at the end; one at least."""
        last = max((i for i, own in enumerate(self.counts) if own.num_steps), default=0)
        return tuple(own.histogram for own in self.counts[: last + 1])

    @property
    def whole(self) -> AcceptanceCounts:
        """Of all bins."""
        return pooled(self.counts, self.counts[0].num_draft_tokens)


def _short(tokens: int) -> str:
    """1024 as 1k; a number that is no multiple of it as it is."""
    thousands, rest = divmod(tokens, _THOUSAND)
    return str(tokens) if rest or not thousands else f"{thousands}k"
