"""What the maths and the shapes of a recurrent drafter follow from."""

from dataclasses import dataclass

from ...geometry import ChainGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyGeometry(ChainGeometry):
    """Config of a recurrent drafter; widths in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux_layers: int
    aux_layer_ids: tuple[int, ...] | None
    rms_norm_eps: float
    num_attention_heads: int = 0
    rope: None = None
