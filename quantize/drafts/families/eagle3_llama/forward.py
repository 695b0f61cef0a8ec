"""Forward maths of P-EAGLE: EAGLE-3's layers, all tokens of a round in one pass.

Behind the row of the last committed token stand K - 1 rows of the mask token, each at the next
position, with what fc makes of mask_hidden in the place of features. Each sees the rows before it,
so that the pass is a chain whose later steps read the mask, not what the step before gave out.

Source: `llm_base_proposer.py:355-384,1404-1416` and `utils.py:495-542` of vLLM 0.33's
`v1/spec_decode`.
"""

from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from ...forward import OnInput
from ...geometry import needed_mask
from ...shared.attention.forward import Attention
from ...shared.eagle3.forward import Eagle3Forward
from ...shared.eagle3.geometry import Eagle3LlamaGeometry


class PEagleForward(Eagle3Forward):
    """One P-EAGLE draft over weights given by canonical name.

    Raises:
        CheckpointError: config.json does not say which token is the mask.
    """

    def __init__(
        self,
        geometry: Eagle3LlamaGeometry,
        weights: Mapping[str, Tensor],
        on_input: OnInput,
        attention: Attention,
    ) -> None:
        super().__init__(geometry, weights, on_input, attention)
        self.mask_token_id = needed_mask(geometry)

    @override
    def later_input(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # The mask.
        mask = self.fuse(self.weights["mask_hidden"].to(hidden.dtype))
        return token_ids.new_full(token_ids.shape, self.mask_token_id), mask.expand_as(hidden)
