"""The four verdicts, which of several counts, and in what words one is given."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "ANOMALOUS"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "ANOMALOUS": 3}
_WORST_FIRST: tuple[Verdict, ...] = ("ANOMALOUS", "FAIL", "INCONCLUSIVE", "PASS")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """ANOMALOUS before FAIL before INCONCLUSIVE before PASS; at least one is given."""
    return min(verdicts, key=_WORST_FIRST.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a verdict calls the way in which drafts were counted.

    Attributes:
        both_again: how both drafts are counted so that they can be compared, a sentence.
        take: what is done with a fresh set of prompts, capital letter. count: the command for that.
        gate: the command that judges them.
        join: ways to put fresh prompts beside those that were judged; none where all are counted
            again. gate_joined: the command that judges all of them.
        longer: how a prompt gets more verify steps.
    """

    both_again: str
    take: str
    count: str
    gate: str
    join: tuple[str, ...]
    gate_joined: str
    longer: str


REPLAYED = Wording(
    both_again="Replay both drafts in one run, with one K.",
    take="Record",
    count="draftquant record --target TARGET --draft BF16 --tables --prompts PROMPTS --out FRESH",
    gate="draftquant gate BF16 QUANT --traces FRESH",
    join=("Join both sets of traces: draftquant traces merge TRACES FRESH --out ALL",),
    gate_joined="draftquant gate BF16 QUANT --traces ALL",
    longer="record longer continuations (record --max-new-tokens), or judge a smaller K",
)


def in_percent(confidence: float) -> str:
    """95%, 98.47%, 99.9999%: with the digits that tell it from certainty."""
    digits = 2 + math.ceil(-math.log10(1 - confidence))
    return f"{100 * confidence:.{digits}g}%"
