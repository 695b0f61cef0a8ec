"""Rounds of which the engine verifies fewer than K tokens, as a rule has it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LengthRule(Protocol):
    """How many drafted tokens a verify step verifies; one request is served at a time."""

    @property
    def name(self) -> str:
        """For people."""

    def length(self, confidences: "Sequence[Tensor]") -> int:
        """Of the last step.

        Args:
            confidences: [K] float32 of each step of the request so far, the last one's own too.

        Returns:
            In [0, K]; 0 = the target decodes one token.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortenedRound:
    """One verify step: where it begins, how many drafted tokens it verifies and accepts."""

    row: int
    verified: int
    accepted: int


def shortened_rounds(
    accepted: Sequence[int], confidences: "Tensor", rule: LengthRule
) -> list[ShortenedRound]:
    """The rounds of decoding one prompt.

    Args:
        accepted: of each row the draft tokens that the target accepts if all K are verified.
        confidences: [R, K] float32 of the same rows.
        rule: of the engine.
    """
    steps: list[ShortenedRound] = []
    seen: list[Tensor] = []
    row = 0
    while row < len(accepted):
        seen.append(confidences[row])
        verified = rule.length(seen)
        kept = min(verified, accepted[row])
        steps.append(ShortenedRound(row=row, verified=verified, accepted=kept))
        row += kept + 1
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortenedCounts:
    """Verify steps of varying length. Add counts; never average averages.

    Attributes:
        num_steps: verify steps, those that verify no drafted token included.
        num_verified: drafted tokens that were verified. num_accepted: that were accepted.
    """

    num_steps: int
    num_verified: int
    num_accepted: int

    @classmethod
    def of(cls, rounds: Sequence[ShortenedRound]) -> "ShortenedCounts":
        """Of rounds."""
        return cls(
            num_steps=len(rounds),
            num_verified=sum(one.verified for one in rounds),
            num_accepted=sum(one.accepted for one in rounds),
        )

    @classmethod
    def pooled(cls, counts: "Iterable[ShortenedCounts]") -> "ShortenedCounts":
        """The sum of counts."""
        every = list(counts)
        return cls(
            num_steps=sum(one.num_steps for one in every),
            num_verified=sum(one.num_verified for one in every),
            num_accepted=sum(one.num_accepted for one in every),
        )

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps; needs at least one step."""
        return 1 + self.num_accepted / self.num_steps

    @property
    def verified_per_step(self) -> float:
        """Drafted tokens that a step verifies; needs at least one step."""
        return self.num_verified / self.num_steps

    @property
    def num_target_tokens(self) -> int:
        """That the target computes: the drafted ones, and one per step behind which they stand."""
        return self.num_steps + self.num_verified
