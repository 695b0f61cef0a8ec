"""Whether a target can feed a draft, by their configs: `record` refuses it, `check` says it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ..drafts.geometry import Geometry

OTHER_TARGET = "give the target that this draft was trained for"


class Sizes(Protocol):
    """The sizes of a target that a draft depends on."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""

    @property
    def hidden_size(self) -> int:
        """Width of one layer's output."""


class Misfit(NamedTuple):
    """What a target cannot give a draft: about what, and in a sentence about the draft."""

    subject: str
    text: str


def misfits(
    geometry: Geometry, sizes: Sizes, asked: Sequence[int] | None = None
) -> Iterator[Misfit]:
    """Vocabulary, width and layers that are not those that the draft was made for.

    A reduced vocabulary of its head, with its map, is no difference.

    Args:
        asked: layers that are handed to it instead of its own; None = these.
    """
    if geometry.vocab_size != sizes.vocab_size:
        yield Misfit(
            "vocabulary",
            f"its vocabulary has {geometry.vocab_size} tokens, the target's {sizes.vocab_size}",
        )
    if not geometry.reads_features:
        return
    reads = geometry.num_aux_layers * geometry.target_hidden_size
    count = len(asked) if asked is not None else geometry.num_aux_layers
    if count * sizes.hidden_size != reads:
        yield Misfit(
            "hidden-size",
            f"it reads {geometry.num_aux_layers} x {geometry.target_hidden_size} = {reads} values,"
            f" the target gives {count} x {sizes.hidden_size} = {count * sizes.hidden_size}",
        )
    beyond = [i for i in geometry.aux_layer_ids or () if i >= sizes.num_layers]
    if asked is None and beyond:
        yield Misfit(
            "layers",
            f"it reads layer {beyond[0]}, the target has layers 0 to {sizes.num_layers - 1}",
        )
