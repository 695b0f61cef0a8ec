"""The table from draft ids to target ids, as everybody here reads and judges it.

Draft id i stands for target id i + d2t[i] (SpecForge, ModelOpt, vLLM 0.33 `llama_eagle3.py`, SGLang
0.5.23 `llama_eagle3.py`); t2d marks the target ids that some draft id stands for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.decoded_numbers import INTEGERS, read_integers, read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMap:
    """One d2t.

    Attributes:
        offsets: what it holds.
        marked: the target ids that t2d marks; None without one.
    """

    offsets: NDArray[np.int64]
    marked: NDArray[np.int64] | None

    @classmethod
    def read(
        cls, checkpoint: Checkpoint, tables: Mapping[str, TensorInfo]
    ) -> "VocabularyMap | None":
        """That of these tables; None where no d2t of whole numbers is among them."""
        if "d2t" not in tables or tables["d2t"].dtype not in INTEGERS:
            return None
        offsets, t2d = read_integers(checkpoint, tables["d2t"]), tables.get("t2d")
        marked = None if t2d is None else np.flatnonzero(read_whole(checkpoint, t2d))
        return cls(offsets=offsets, marked=marked)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The target id of each draft id."""
        return self.offsets + np.arange(len(self.offsets))

    @property
    def repeated(self) -> int:
        """How many draft ids stand for a target id for which another one stands."""
        return len(self.offsets) - len(np.unique(self.ids))

    @property
    def agrees(self) -> bool:
        """Whether it stands for what t2d marks."""
        return self.marked is None or np.array_equal(np.unique(self.ids), self.marked)

    @property
    def is_absolute(self) -> bool:
        """Whether it holds target ids in the place of offsets.

        Without t2d: no two neighbours among thousands of kept ids is implausible.
        """
        if self.marked is None:
            return len(self.offsets) > 1 and bool((np.diff(self.offsets) > 0).all())
        return not self.agrees and np.array_equal(self.offsets, self.marked)

    def outside(self, vocab_size: int) -> list[int]:
        """The draft ids that stand for no token of the vocabulary."""
        ids = np.arange(len(self.offsets))
        beyond = (self.offsets < -ids) | (self.offsets >= vocab_size - ids)
        found: list[int] = np.flatnonzero(beyond).tolist()
        return found
