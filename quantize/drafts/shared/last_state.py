"""What is common to drafts that read the target's last hidden state, or its tokens alone."""


class LastStateGeometry:
    """A chain over the target's whole vocabulary and width, without an fc over its layers."""

    __slots__ = ()

    hidden_size: int
    vocab_size: int

    @property
    def draft_vocab_size(self) -> int:
        """All of the target's tokens."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The draft is as wide as the target."""
        return self.hidden_size

    @property
    def num_aux_layers(self) -> int:
        """One: the target's last hidden state, behind its final norm."""
        return 1

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """None: no output of a layer is read."""
        return None

    @property
    def fuses(self) -> bool:
        """False: there is no fc."""
        return False

    @property
    def block_size(self) -> None:
        """None: the draft proposes a chain."""
        return
