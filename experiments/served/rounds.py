"""Rounds of speculative decoding over all prompts of an engine and of replay, one beside the other.

The traces are the engine's own: its target without a draft, its hidden states. A round with n
tokens of the output behind it drafts tokens n to n + K - 1. Replay says of every n what would be
accepted, so that each round of the engine is compared at its own n, whatever went before, as far as
the engine wrote the recorded text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.validate.counting.trace_replay import decoding_steps
from draftquant.validate.served.common_steps import common_length
from served.every_position import EveryPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What an engine and replay counted over the same prompts.

    Attributes:
        served: accepted tokens of every round of the engine.
        replayed: of every round of replay, over the whole traces.
        compared: of the engine's rounds that replay can judge: (served, replayed).
        num_near_ties: of those that differ, where the draft's choice was one.
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
    by_place: Sequence[EveryPosition],
    num_draft_tokens: int,
    *,
    near: float,
) -> Rounds:
    """Hold an engine's rounds against replay's.

    Args:
        texts: per prompt, the tokens that the engine generated.
        accepted: per prompt, accepted tokens of its rounds, in order.
        traces: of the same prompts in the same order.
        by_place: replay at every place of each: entry i has i + 1 tokens of the recorded text
            behind it, the first of which comes from reading the prompt.
        num_draft_tokens: K.
        near: distance between two tokens up to which either may come out on top.
    """
    compared: list[tuple[int, int]] = []
    num_near_ties = num_same_text = 0
    for text, steps, trace, here in zip(texts, accepted, traces, by_place, strict=True):
        common = common_length(text, trace.continuation)
        num_same_text += common == len(text)
        *starts, _ = accumulate((step + 1 for step in steps), initial=1)
        for served, start in zip(steps, starts, strict=True):
            if start + num_draft_tokens > common:
                break
            replayed = here.accepted[start - 1]
            compared.append((served, replayed))
            if served != replayed:  # they parted at the first token that one of the two missed
                num_near_ties += abs(here.distances[start - 1][min(served, replayed)]) <= near
    return Rounds(
        served=tuple(step for steps in accepted for step in steps),
        replayed=tuple(step for here in by_place for step in decoding_steps(here.accepted)),
        compared=tuple(compared),
        num_near_ties=num_near_ties,
        num_same_text=num_same_text,
        num_prompts=len(texts),
    )
