"""What the maths and the shapes of a DFlash draft follow from."""

from dataclasses import dataclass

from typing_extensions import override

from ...geometry import BlockGeometry
from ...rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashGeometry(BlockGeometry):
    """Config of a DFlash draft; widths in elements.

    Attributes:
        aux_layer_ids: `target_layer_ids`, 0-based, after the layer, ascending.
        block_size: slots of one block as it was trained, the anchor and up to block_size - 1 masks.
        mask_token_id: the token in the slots to fill in; None where config.json does not say which.
        layer_types: attention of every layer, None = all full.
        sliding_window: positions that a sliding layer sees, its own included.
        causal: inside the block; None = full layers in both directions, sliding layers causal.
        proposes_from_anchor: a slot predicts the token behind it, so that the anchor's predicts the
            first; else it predicts the one in its own place, and the anchor's predicts nothing.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    rms_norm_eps: float
    rope: RopeConfig
    block_size: int
    mask_token_id: int | None
    layer_types: tuple[str, ...] | None
    sliding_window: int | None
    causal: bool | None
    proposes_from_anchor: bool = False

    @property
    def num_aux_layers(self) -> int:
        """How many target layers are concatenated into the input of fc."""
        return len(self.aux_layer_ids)

    def is_sliding(self, layer: int) -> bool:
        """True if a layer sees a window of the context only."""
        return self.layer_types is not None and self.layer_types[layer] == "sliding_attention"

    @override
    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.is_sliding(layer) else None

    def is_causal(self, layer: int) -> bool:
        """True if a slot sees no slot after it.

        Source: vLLM 0.33 `_dflash_layer_causal`; SGLang 0.5.23 `_get_dflash_layer_attention_params`
        is the same but for `dflash_config.causal`, which it does not read.
        """
        return self.is_sliding(layer) if self.causal is None else self.causal
