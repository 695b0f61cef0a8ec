"""Rounds of speculative decoding, counted by an engine and by replay, one beside the other.

The traces are of the text that the engine wrote without a draft: the target in transformers reads
it, and what it captures on the way is replayed. A round with n tokens of the continuation behind it
drafts tokens n to n + K - 1. Replay says of every n what would be accepted, so each round of the
engine is compared at its own n, whatever went before, as long as the engine with the draft writes
the same text as without.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from draftquant.calibration.draft_inputs import first_hidden
from draftquant.calibration.predictions import draft_predictions
from draftquant.calibration.prompt_trace import PromptTrace
from draftquant.calibration.traces import TraceFolder
from draftquant.quantize.stored.loading import LoadedDraft
from draftquant.validate.rounds import accepted_by_row, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What an engine and replay counted over the same prompts.

    Attributes:
        served: accepted tokens of every round of the engine.
        replayed: of every round of replay, over the whole traces.
        compared: of the engine's rounds that replay can judge: (served, replayed).
        num_same_text: prompts that the engine continued as without a draft. num_prompts: all.
    """

    served: tuple[int, ...]
    replayed: tuple[int, ...]
    compared: tuple[tuple[int, int], ...]
    num_same_text: int
    num_prompts: int

    @property
    def num_equal(self) -> int:
        """Compared rounds in which both accept the same number of tokens."""
        return sum(served == replayed for served, replayed in self.compared)


def acceptance_length(accepted: Sequence[int]) -> float:
    """Tokens per round, the target's own among them: 1 + mean(accepted)."""
    return 1 + sum(accepted) / len(accepted)


def continuations(traces: TraceFolder, prompt_lengths: Sequence[int]) -> list[PromptTrace]:
    """Traces that were recorded as prompts only, of which so many tokens are the prompt."""
    return [
        replace(trace, prompt_length=length)
        for trace, length in zip(traces, prompt_lengths, strict=True)
    ]


def replayed_by_position(
    draft: LoadedDraft, traces: TraceFolder, texts: Sequence[PromptTrace], num_draft_tokens: int
) -> list[list[int]]:
    """Per prompt, what is accepted of a round that starts behind each token of the continuation.

    Entry i belongs to a round with i + 1 tokens of the continuation behind it: the first of them
    comes from reading the prompt.
    """
    return [
        accepted_by_row(
            trace,
            draft_predictions(
                draft.forward,
                first_hidden(draft, traces, trace),
                trace.token_ids,
                first_row=trace.prompt_length - 1,
                num_draft_tokens=num_draft_tokens,
            ),
        )
        for trace in texts
    ]


def compare(
    texts: Sequence[Sequence[int]],
    accepted: Sequence[Sequence[int]],
    traces: Sequence[PromptTrace],
    by_position: Sequence[Sequence[int]],
    num_draft_tokens: int,
) -> Rounds:
    """Hold an engine's rounds against replay's.

    Args:
        texts: per prompt, the tokens that the engine generated.
        accepted: per prompt, accepted tokens of its rounds, in order.
        traces: of the same prompts in the same order.
        by_position: see `replayed_by_position`.
        num_draft_tokens: K.
    """
    compared: list[tuple[int, int]] = []
    num_same_text = 0
    for text, steps, trace, here in zip(texts, accepted, traces, by_position, strict=True):
        pairs = zip(text, trace.continuation, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_same_text += common == len(text)
        written = 1
        for step in steps:
            if written + num_draft_tokens <= common:
                compared.append((step, here[written - 1]))
            written += step + 1
    return Rounds(
        served=tuple(step for steps in accepted for step in steps),
        replayed=tuple(step for here in by_position for step in rounds(here)),
        compared=tuple(compared),
        num_same_text=num_same_text,
        num_prompts=len(texts),
    )
