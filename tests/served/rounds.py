"""Rounds of speculative decoding, counted by an engine and by replay, one beside the other.

The traces are the engine's own: its target without a draft, its hidden states. A round with n
tokens of the continuation behind it drafts tokens n to n + K - 1. Replay says of every n what would
be accepted, so each round of the engine is compared at its own n, whatever went before, as long as
the engine with the draft writes the same text as without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.validate.rounds import rounds
from served.places import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What an engine and replay counted over the same prompts.

    Attributes:
        served: accepted tokens of every round of the engine.
        replayed: of every round of replay, over the whole traces.
        compared: of the engine's rounds that replay can judge: (served, replayed).
        num_near_ties: of those that differ, where the draft's choice was one, see `places`.
        num_same_text: prompts that the engine continued as without a draft. num_prompts: all.
    """

    served: tuple[int, ...]
    replayed: tuple[int, ...]
    compared: tuple[tuple[int, int], ...]
    num_near_ties: int
    num_same_text: int
    num_prompts: int

    @property
    def num_equal(self) -> int:
        """Compared rounds in which both accept the same number of tokens."""
        return sum(served == replayed for served, replayed in self.compared)


def acceptance_length(accepted: Sequence[int]) -> float:
    """Tokens per round, the target's own among them: 1 + mean(accepted)."""
    return 1 + sum(accepted) / len(accepted)


def compare(
    texts: Sequence[Sequence[int]],
    accepted: Sequence[Sequence[int]],
    traces: Sequence[PromptTrace],
    by_place: Sequence[Places],
    num_draft_tokens: int,
    *,
    near: float,
) -> Rounds:
    """Hold an engine's rounds against replay's.

    Args:
        texts: per prompt, the tokens that the engine generated.
        accepted: per prompt, accepted tokens of its rounds, in order.
        traces: of the same prompts in the same order.
        by_place: replay of a round behind each token of the continuation: entry i has i + 1 tokens
            of it behind it, the first of which comes from reading the prompt.
        num_draft_tokens: K.
        near: distance between two tokens up to which either may come out on top.
    """
    compared: list[tuple[int, int]] = []
    num_same_text = num_near_ties = 0
    for text, steps, trace, here in zip(texts, accepted, traces, by_place, strict=True):
        pairs = zip(text, trace.continuation, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_same_text += common == len(text)
        written = 1
        for step in steps:
            if written + num_draft_tokens <= common:
                replayed = here.accepted[written - 1]
                compared.append((step, replayed))
                if step != replayed:  # they parted at the first token that one of the two missed
                    distance = here.distances[written - 1][min(step, replayed)]
                    num_near_ties += abs(distance) <= near
            written += step + 1
    return Rounds(
        served=tuple(step for steps in accepted for step in steps),
        replayed=tuple(step for here in by_place for step in rounds(here.accepted)),
        compared=tuple(compared),
        num_near_ties=num_near_ties,
        num_same_text=num_same_text,
        num_prompts=len(texts),
    )
