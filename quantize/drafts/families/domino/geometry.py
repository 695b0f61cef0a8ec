"""What the maths and the shapes of a Domino draft follow from, besides those of DFlash."""

from dataclasses import dataclass

from ..dflash.geometry import DFlashGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class DominoGeometry(DFlashGeometry):
    """Config of a Domino draft.

    Attributes:
        shift_label: a slot predicts the token behind it, the last slot nothing; else it predicts
            the one in its own place, the anchor's nothing.
        pure_draft_prefix_len: first tokens of a block whose logits are the head's alone.
        gru_hidden_dim: width of the GRU that reads the tokens so far.
        emb_dim: width between the two halves of the projection.
    """

    shift_label: bool
    pure_draft_prefix_len: int
    gru_hidden_dim: int
    emb_dim: int
