"""Forward maths of a recurrent drafter, whose passes are of a kind of their own."""

from collections.abc import Iterator

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

from ...forward import BLOCK_ROWS, Alive, DraftForward, DraftPass, finite
from ...maths import embedding, linear, rms_norm
from .geometry import ToyGeometry


class ToyForward(DraftForward):
    """s_0 = fc(features), s_{j+1} = e + mlp(e + decay * s_j) of the embedding e of the token read.

    No row looks at another one, so that chains may be run in any order.
    """

    geometry: ToyGeometry

    @override
    def fuse(self, features: Tensor) -> Tensor:
        return self._linear("fc", features)

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
            state = hidden[:, chosen.start : chosen.stop : chosen.step]
            for depth in range(num_draft_tokens):
                first, last = chosen.start + 1 + depth, chosen.stop + 1 + depth
                state = self._step(token_ids[:, first : last : chosen.step], state)
                where = f"recurrent step {depth + 1}"
                yield DraftPass(
                    rows=chosen,
                    depths=range(depth, depth + 1),
                    where=where,
                    hidden=(state if alive else finite(state, where))[:, :, None],
                )

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return linear(self.head_input(hidden), self.weights["lm_head.weight"])

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, self.weights["norm.weight"], self.geometry.rms_norm_eps)
        return self.on_input("lm_head", normed)

    def _step(self, token_ids: Tensor, state: Tensor) -> Tensor:
        e = embedding(token_ids, self.weights["embed_tokens.weight"], state.dtype)
        x = e + self.weights["decay"] * state
        for i in range(self.geometry.num_layers):
            mlp = f"layers.{i}.mlp"
            gate, up = self._linear(f"{mlp}.gate_proj", x), self._linear(f"{mlp}.up_proj", x)
            x = e + self._linear(f"{mlp}.down_proj", F.silu(gate) * up)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(self.on_input(name, x), self.weights[f"{name}.weight"]).to(x.dtype)
