"""What the maths and the shapes of a DSpark draft follow from."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..dflash.geometry import DFlashGeometry

MarkovHead = Literal["vanilla", "gated", "rnn"]
MARKOV_HEADS: tuple[MarkovHead, ...] = get_args(MarkovHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkGeometry(DFlashGeometry):
    """Config of a DSpark draft: a DFlash body, a Markov head, perhaps a confidence head.

    Attributes:
        markov_rank: width r of what stands for the token before.
        markov_head_type: what is made of it; "gated" and "rnn" read the hidden state as well.
        confidence_width: inputs of the confidence head, the hidden state and perhaps r more.
    """

    markov_rank: int
    markov_head_type: MarkovHead
    confidence_width: int
