"""Drafts of several heads, each of which proposes from the target's state of the row itself.

Head j reads the target's state of position t and predicts token t + 2 + j: no head reads a token,
or what another one proposed, so that rows and depths may be evaluated in any order.
"""

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor
from typing_extensions import override

from ..forward import BLOCK_ROWS, Alive, DraftForward, DraftPass, finite


class HeadsForward(DraftForward):
    """A draft of several heads: each proposes one token, all from the same state of the target."""

    @abstractmethod
    def propose(self, hidden: Tensor, depth: int) -> Tensor:
        """What one head makes of the target's states.

        Args:
            hidden: [..., W], from `fuse`.
            depth: which head; it proposes the token `depth` places behind the first drafted one.

        Returns:
            [..., W'], for `logits`, which is asked about one depth at a time.
        """

    @override
    def passes(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        rows: range,
        num_draft_tokens: int,
        block_rows: int = BLOCK_ROWS,
        alive: Alive | None = None,
    ) -> Iterator[DraftPass]:
        for start in range(0, len(rows), block_rows):
            chosen = rows[start : start + block_rows]
            states = hidden[:, chosen.start : chosen.stop : chosen.step]
            kept: Tensor | None = None
            for depth in range(num_draft_tokens):
                if depth > 0 and alive and (left := alive()) is not None:
                    states = states.flatten(0, 1)[left][None]
                    kept = left if kept is None else kept[left]
                if not states.shape[1]:
                    break
                x, where = self.propose(states, depth), f"draft head {depth + 1}"
                yield DraftPass(
                    rows=chosen,
                    depths=range(depth, depth + 1),
                    where=where,
                    hidden=(x if alive else finite(x, where))[:, :, None],
                    kept=kept,
                )
