"""What the maths and the shapes of a DFlash2 draft follow from, besides those of DFlash."""

from dataclasses import dataclass

from ..dflash.geometry import DFlashGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Geometry(DFlashGeometry):
    """Config of a DFlash2 draft.

    Attributes:
        conv_kernel_size: taps of the convolutions: a slot and those before it.
        conv_group_size: channels that share what the input adds to a kernel.
        selector_rank: width of the codebooks.
        selector_top_k: tokens of the head among which each slot chooses.
        input_embedding_scale: multiplies the embeddings of a block.
        output_multiplier: multiplies the head's logits, > 0.
        final_logit_softcapping: c of c tanh(logits / c), behind the multiplier; None = none.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @property
    def num_groups(self) -> int:
        """Groups of channels in a convolution."""
        return self.hidden_size // self.conv_group_size
