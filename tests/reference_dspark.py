"""A DSpark draft that chooses its tokens one after the other: the oracle of our forward maths.

Its body is that of `reference_dflash.py`, made of transformers' modules; its heads are torch's own
`Embedding`, `Linear` and, step by step, the recurrence of DSpark's paper. It shares no line with
`quantize/drafts`.
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
        inputs = g.hidden_size + g.markov_rank
        self.gate = nn.Linear(inputs, g.markov_rank)
        self.joint = nn.Linear(inputs + g.markov_rank, 3 * g.markov_rank)
        for module, name in (
            (self.w1, "markov_w1"),
            (self.w2, "markov_w2"),
            (self.gate, "gate_proj"),
            (self.joint, "joint_proj"),
        ):
            prefix = f"markov_head.{name}."
            own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
            if own:
                module.to(next(iter(own.values())).dtype).load_state_dict(own)

    @torch.no_grad()
    def steps(self, anchor: int, num_draft_tokens: int, choose: Choose) -> list[Tensor]:
        """Logits [draft vocabulary] of each step; `choose` makes of them the token that follows."""
        first = 0 if self.geometry.proposes_from_anchor else 1
        hidden = self.body.slots(anchor, num_draft_tokens - 1 + first)[first:]
        state, token, found = torch.zeros_like(self.w1.weight[0]), anchor, []
        for h in hidden:
            e = self.w1.weight[token]
            if self.geometry.markov_head_type == "rnn":
                gate, candidate, output = self.joint(torch.cat((state, e, h))).chunk(3)
                keep = torch.sigmoid(gate)
                state, e = keep * state + (1 - keep) * torch.tanh(candidate), torch.tanh(output)
            elif self.geometry.markov_head_type == "gated":
                e = torch.sigmoid(self.gate(torch.cat((h, e)))) * e
            found.append(self.body.lm_head(h) + self.w2(e))
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
