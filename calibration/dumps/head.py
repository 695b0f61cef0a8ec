"""The target's head on dumped last states: which of them it reads, and whether the text is its own.

argmax(head(norm?(h))) is the next token wherever the target chose it. Tried are states as they are
and through the last norm, each as the state of the token of its row, of the one before and of the
one behind it. The reading with which most answers are reproduced is the dump's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import TraceError
from ..traces.head_agreement import MIN_AGREEMENT, normalized
from ..traces.target_tables import FINAL_NORM, HEAD, SharedTables
from .dump_answers import Answer

SHIFTS = (-1, 0, 1)
"""Row i holds the state after token i + shift."""
MAX_ROWS = 256  # of an answer, evenly spaced
NEAR_TIE = 0.25
"""Nats. A text is dumped by one pass over it and was written token by token: in BF16 the two differ
by 0.06 on the shipped targets, and larger ones by some tenths."""
_OFF_POLICY = 0.3  # text of others is reproduced to a half or more, other tokens hardly

_NORMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "after the last norm": lambda hidden, _norm: hidden,
        "before the last norm": lambda hidden, norm: normalized(hidden) * norm,
        "before the last norm, 1 + its weights": lambda hidden, norm: (
            normalized(hidden) * (1 + norm)
        ),
    }
)
"""Where states may have been taken -> what the head reads of them, with the norm's weight [W]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFinding:
    """How dumped last states are to be read.

    Attributes:
        norm: where they were taken, in words.
        shift: see `SHIFTS`.
        share: of positions whose token is reproduced, in [0, 1], over the answers looked at.
    """

    norm: str
    shift: int
    share: float


class TargetHead:
    """The head [V, W] and the weight [W] of the norm before it, in float32."""

    def __init__(self, tables: SharedTables) -> None:
        self._head = tables[HEAD].float()
        self._norm = tables[FINAL_NORM].float()

    def settle(self, answers: Sequence[tuple[Answer, Tensor]]) -> HeadFinding:
        """Find the reading under which the head reproduces the answers.

        Args:
            answers: some of the dump, each with its sample's last states [N, W].

        Raises:
            TraceError: under no reading is any answer reproduced to 98 %.
        """
        shares = {
            reading: [self.share(answer, last, *reading) for answer, last in answers]
            for reading in product(_NORMS, SHIFTS)
        }
        best = max(shares, key=lambda r: (_reproduced(shares[r]), sum(shares[r])))
        share = sum(shares[best]) / len(answers)
        if not _reproduced(shares[best]):
            what = (
                "the text comes from a data set, or was sampled"
                if share >= _OFF_POLICY
                else (
                    "the tokens are those of another tokenizer, or the states those of another"
                    " target"
                )
            )
            raise TraceError(
                answers[0][0].sample.file.parent,
                f"the target wrote none of the {len(answers)} answers: at best, its head"
                f" predicts {share:.0%} of their tokens (with the states {best[0]},"
                f" {_beside(best[1])}), expected {MIN_AGREEMENT:.0%}. Probably {what}",
                fix="dump the target's own greedy answers, and give the target that was dumped",
            )
        return HeadFinding(norm=best[0], shift=best[1], share=share)

    def share(self, answer: Answer, last: Tensor, norm: str, shift: int) -> float:
        """Share of an answer's tokens that the head says, near ties included; 0 of no tokens."""
        positions = torch.arange(max(answer.start, 1), answer.stop)
        rows = positions - 1 - shift
        positions = positions[(rows >= 0) & (rows < len(last))]
        positions = positions[:: -(-len(positions) // MAX_ROWS) or 1]
        if not len(positions):
            return 0.0
        hidden = _NORMS[norm](last[positions - 1 - shift].float(), self._norm)
        logits = hidden @ self._head.T
        said = logits.gather(1, answer.sample.token_ids[positions, None])[:, 0]
        return float((logits.amax(dim=1) - said <= NEAR_TIE).double().mean())


def _reproduced(shares: Sequence[float]) -> int:
    return sum(share >= MIN_AGREEMENT for share in shares)


def _beside(shift: int) -> str:
    return "at the positions of their tokens" if not shift else f"shifted by {shift:+d} token"
