"""What the maths and the shapes of Medusa heads follow from."""

from dataclasses import dataclass

from typing_extensions import override

from ...geometry import HeadsGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaGeometry(HeadsGeometry):
    """Config of Medusa heads, each of which proposes one token from one state of the target.

    Attributes:
        num_heads: how many, K at most. layers_per_head: residual blocks of each.
        truncated_vocab_size: tokens that can be proposed, of the target's `vocab_size`.
        shared_head: one lm_head stands behind all of them, not one behind each.
        biased: config.json says that the linears of the blocks have biases.
    """

    hidden_size: int
    vocab_size: int
    truncated_vocab_size: int
    num_heads: int
    layers_per_head: int
    shared_head: bool
    biased: bool

    @property
    @override
    def draft_vocab_size(self) -> int:
        return self.truncated_vocab_size

    @property
    def num_layers(self) -> int:
        """Residual blocks of all heads."""
        return self.num_heads * self.layers_per_head

    @property
    def num_attention_heads(self) -> int:
        """None at all."""
        return 0

    @property
    def rope(self) -> None:
        """None: nothing is rotated."""
        return
