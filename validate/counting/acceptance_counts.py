"""Counts in, numbers out: acceptance figures of one draft.

Pure arithmetic. It knows neither drafts nor files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NGRAM_ORDER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """How many verify steps accepted 0, 1, ... K draft tokens. Add counts; never average averages.

    Attributes:
        histogram: [K + 1] steps by number of accepted draft tokens, the bonus token not counted;
            whole numbers where steps were counted, any where they are expected (`expectation`).
    """

    histogram: tuple[float, ...]

    @classmethod
    def of(cls, accepted: Sequence[int], num_draft_tokens: int) -> "AcceptanceCounts":
        """Of verify steps by how many draft tokens each accepted."""
        return cls(histogram=tuple(accepted.count(j) for j in range(num_draft_tokens + 1)))

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip(self.histogram, other.histogram, strict=True)
        return AcceptanceCounts(histogram=tuple(a + b for a, b in pairs))

    @property
    def num_draft_tokens(self) -> int:
        """K, proposed in every step."""
        return len(self.histogram) - 1

    @property
    def num_steps(self) -> float:
        """Verify steps."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> float:
        """Over all steps, without bonus tokens."""
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
        return tuple(reached / self.num_steps for reached in self.accepted_at)

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """[K] steps that accepted at least j = 1 .. K draft tokens: those that accepted token j."""
        return tuple(self._reached()[1:])

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """[K] share of the steps that accepted j - 1 tokens or more which also accepted token j.

        None where no step got that far.
        """
        reached = self._reached()
        return tuple(after / before if before else None for before, after in pairwise(reached))

    def _reached(self) -> list[float]:
        """[K + 1] steps that accepted at least 0 .. K draft tokens."""
        return [sum(self.histogram[j:]) for j in range(len(self.histogram))]


def pooled(counts: Iterable[AcceptanceCounts], num_draft_tokens: int) -> AcceptanceCounts:
    """The sum of counts, zero steps for none."""
    none: tuple[float, ...] = (0,) * (num_draft_tokens + 1)
    columns = zip(none, *(one.histogram for one in counts), strict=True)
    return AcceptanceCounts(histogram=tuple(map(sum, columns)))


def repeated_ngram_share(
    continuations: Iterable[Sequence[int]], *, order: int = NGRAM_ORDER
) -> float:
    """Share of n-grams that occurred earlier in the same continuation: loops are easy to draft.

    Args:
        continuations: token ids without the prompts.
        order: tokens per n-gram.

    Returns:
        Pooled over the continuations, in [0, 1); 0 if none is as long as one n-gram.
    """
    total = distinct = 0
    for tokens in continuations:
        ngrams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
        total += len(ngrams)
        distinct += len(set(ngrams))
    return 1 - distinct / total if total else 0.0
