"""Forward maths of Domino: DFlash whose logits a GRU over the tokens so far corrects.

Sources: SpecForge `modeling/draft/domino.py` at a6b6b02; SGLang 0.5.23 `domino_utils.py:300-470`,
which scores a pool of tokens unless --speculative-domino-candidate-pool-size is 0: here, as in
training, it is the whole vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from typing_extensions import override

from ...maths import Product, embedding, linear
from ..dflash.forward import DFlashForward
from .geometry import DominoGeometry


class DominoForward(DFlashForward):
    """One Domino draft over weights given by canonical name.

    Its tokens are chosen one after the other. Behind tokens that are right, the GRU has read the
    recorded ones, and behind the first wrong one nothing counts: so it reads the recorded ones.
    """

    geometry: DominoGeometry

    def proposing(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Hidden states of the slots and what corrects their logits, before the last product.

        Returns:
            [A, K, W + emb_dim].
        """
        g = self.geometry
        hidden = x[:, :-1] if g.shift_label else x[:, 1:]
        states = self._prefix_states(token_ids[:, :-1], x.dtype)
        read = torch.cat((self.norm("norm", hidden), states), dim=-1)
        correction = F.silu(linear(read, self.weights["embed_proj.0.weight"]).to(x.dtype))
        uncorrected = torch.arange(hidden.shape[1], device=x.device) < g.pure_draft_prefix_len
        return torch.cat((hidden, correction.masked_fill(uncorrected[:, None], 0)), dim=-1)

    @override
    def products(self, hidden: Tensor) -> Sequence[Product]:
        correction = hidden[..., self.geometry.hidden_size :]
        return [*super().products(hidden), (correction, self.weights["embed_proj.2.weight"], None)]

    @override
    def head_input(self, hidden: Tensor) -> Tensor:
        return super().head_input(hidden[..., : self.geometry.hidden_size])

    def _prefix_states(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The GRU's state behind each of the tokens, [A, T] -> [A, T, gru_hidden_dim].

        With gates r, z and candidate c, of input i and of the state s before it:
        s' = (1 - z) * tanh(i_c + r * s_c) + z * s.
        """
        read = embedding(token_ids, self.weights["embed_tokens.weight"], dtype)
        of_inputs = linear(read, self.weights["prefix_gru.weight_ih_l0"]).to(dtype)
        state = read.new_zeros(len(token_ids), self.geometry.gru_hidden_dim)
        states = []
        for of_input in of_inputs.unbind(1):
            i_r, i_z, i_c = of_input.chunk(3, dim=-1)
            of_state = linear(state, self.weights["prefix_gru.weight_hh_l0"]).to(dtype)
            s_r, s_z, s_c = of_state.chunk(3, dim=-1)
            z = (i_z + s_z).sigmoid()
            state = (1 - z) * (i_c + (i_r + s_r).sigmoid() * s_c).tanh() + z * state
            states.append(state)
        return torch.stack(states, dim=1)
