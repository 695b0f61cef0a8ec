"""A DSpark draft that chooses its tokens one after the other: the oracle of our forward maths.

Its body is that of `reference_dflash.py`, made of transformers' modules; its heads are torch's own
`Embedding` and `Linear`. It shares no line with `quantize/drafts`.
"""

from collections.abc import Callable, Mapping

import torch
from draftquant.quantize.drafts.families.dspark import DSparkGeometry
from reference_dflash import ReferenceDFlash, RoundInput
from torch import Tensor, nn

Choose = Callable[[Tensor], int]


class ReferenceDSpark:
    """One draft whose KV cache holds the context; see `ReferenceDFlash`."""

    def __init__(
        self,
        geometry: DSparkGeometry,
        weights: Mapping[str, Tensor],
        round_input: RoundInput | None = None,
    ) -> None:
        heads = ("markov_head.", "confidence_head.")
        body = {name: tensor for name, tensor in weights.items() if not name.startswith(heads)}
        self.body = ReferenceDFlash(geometry, body, round_input)
        self.geometry, self.d2t = geometry, weights.get("d2t")
        self.extend = self.body.extend
        g = geometry
        self.w1 = nn.Embedding(g.vocab_size, g.markov_rank)
        self.w2 = nn.Linear(g.markov_rank, g.draft_vocab_size, bias=False)
        for module, name in ((self.w1, "markov_w1"), (self.w2, "markov_w2")):
            own = weights[f"markov_head.{name}.weight"]
            module.to(own.dtype).load_state_dict({"weight": own})

    @torch.no_grad()
    def steps(self, anchor: int, num_draft_tokens: int, choose: Choose) -> list[Tensor]:
        """Logits [draft vocabulary] of each step; `choose` makes of them the token that follows."""
        first = 0 if self.geometry.proposes_from_anchor else 1
        hidden = self.body.slots(anchor, num_draft_tokens - 1 + first)[first:]
        token, found = anchor, []
        for h in hidden:
            found.append(self.body.lm_head(h) + self.w2(self.w1.weight[token]))
            token = choose(found[-1])
        return found

    def draft(self, anchor: int, num_draft_tokens: int) -> list[int]:
        """The proposed tokens, target vocabulary."""
        chosen: list[int] = []

        def greedy(logits: Tensor) -> int:
            best = int(logits.argmax())
            chosen.append(best if self.d2t is None else best + int(self.d2t[best]))
            return chosen[-1]

        self.steps(anchor, num_draft_tokens, greedy)
        return chosen
