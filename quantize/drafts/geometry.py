"""The numbers that shapes and maths follow from, and what a draft of each kind is like.

Drafts of a kind have their answers here, as properties of a base class without fields; a family's
own geometry is a frozen dataclass over one of them, and says otherwise where its drafts differ.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from typing_extensions import override

from ...recipes.errors import CheckpointError
from .rope import RopeConfig

CHAIN_LENGTH = 3
"""Tokens of a chain, which has no length of its own, as it is usually served."""
SIZE_KEY = "draft_vocab_size"
"""Of config.json, at its top level in every layout: the rows of the head. SpecForge, ModelOpt,
speculators, vLLM and SGLang say so, and by the next two tables, of EAGLE-3, DFlash and DSpark."""
MAP = "d2t"
"""Canonical name of the table from draft ids to target ids, as offsets: target id - draft id."""
MASK = "t2d"
"""Canonical name of the table that marks the target ids which have a row."""


class TokenLimit(NamedTuple):
    """How many tokens a draft can propose at most, and why no more."""

    tokens: int
    why: str


class Kind(Protocol):
    """What most drafts are like."""

    __slots__ = ()

    @property
    def most_draft_tokens(self) -> int | None:
        """Tokens that a whole block proposes, or all heads do; None for a draft of a chain."""
        return None

    @property
    def token_limit(self) -> TokenLimit | None:
        """What a replay with more draft tokens is refused by; None where there is no limit."""
        return None

    @property
    def reads_layers(self) -> bool:
        """False for a draft that reads the target's last hidden state, behind the final norm.

        Traces hold that state as "fused" features, of no fc.
        """
        return True

    @property
    def reads_features(self) -> bool:
        """False for a draft that reads tokens alone."""
        return True

    @property
    def parallel(self) -> bool:
        """True where all tokens of a chain are drafted in one pass, behind mask tokens."""
        return False

    @property
    def num_modules(self) -> int:
        """Draft steps that have a module of their own; 1 = all steps are of one."""
        return 1

    def window_of(self, layer: int) -> int | None:  # noqa: ARG002 - where layers differ
        """Positions that a query of a layer sees, its own among them; None = all."""
        return None


class Geometry(Kind, Protocol):
    """The part of a family's config that every family has; widths in elements."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the draft."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def hidden_size(self) -> int:
        """Width of the draft's hidden states."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the draft can propose."""

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""

    @property
    def num_aux_layers(self) -> int:
        """How many target layers are concatenated into the input of fc."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """Target layers that the draft reads (0-based, after the layer); None = default."""

    @property
    def rope(self) -> RopeConfig | None:
        """How queries and keys are rotated; None where there are none."""

    @property
    def block_size(self) -> int | None:
        """Anchor and mask tokens of one block; None for a draft that proposes a chain."""

    @property
    def mask_token_id(self) -> int | None:
        """The token that stands where a token is to be filled in; None where there is none."""


@runtime_checkable
class GroupedAttention(Geometry, Protocol):
    """A draft whose query heads share heads of keys and values."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""


@runtime_checkable
class LatentAttention(Geometry, Protocol):
    """A draft with multi-head latent attention: one latent row for each position."""

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Width of the rotated part of a key, which all heads share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """What every draft of decoder layers has; widths in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig


class ChainGeometry(Kind):
    """A draft that proposes token after token, as many as it is asked for."""

    __slots__ = ()

    @property
    def block_size(self) -> int | None:
        """None: there are no blocks."""
        return None

    @property
    def mask_token_id(self) -> int | None:
        """None: nothing is filled in."""
        return None


class BlockGeometry(Kind):
    """A draft that fills a block of `block_size` slots at once."""

    __slots__ = ()

    block_size: int
    mask_token_id: int | None

    @property
    def proposes_from_anchor(self) -> bool:
        """True if the anchor's slot proposes the first token, and not the slot behind it."""
        return False

    @property
    @override
    def most_draft_tokens(self) -> int:
        return self.block_size - (not self.proposes_from_anchor)

    @property
    @override
    def token_limit(self) -> TokenLimit:
        given = "" if self.proposes_from_anchor else ", and the first of them is given"
        return TokenLimit(
            self.most_draft_tokens, f"the draft fills blocks of {self.block_size} tokens{given}"
        )


class LastStateGeometry(ChainGeometry):
    """A chain over the target's whole vocabulary and width, without an fc over its layers.

    It reads the target's last hidden state, behind the final norm, or its tokens alone.
    """

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
        """One: the target's last hidden state."""
        return 1

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """None: no output of a layer is read."""
        return None

    @property
    def fuses(self) -> bool:
        """False: there is no fc over layers."""
        return False

    @property
    @override
    def reads_layers(self) -> bool:
        return False


def needed_mask(geometry: Geometry) -> int:
    """The token that stands where a token is to be filled in."""
    if geometry.mask_token_id is None:
        raise CheckpointError(
            "config.json",
            "mask_token_id: missing key, which says what stands where the draft fills in a token",
            fix="add 'mask_token_id' as the draft was trained with it",
        )
    return geometry.mask_token_id


def vocabulary_share(geometry: Geometry) -> str | None:
    """How many of the target's tokens a draft can propose, in words; None where it is all."""
    own, whole = geometry.draft_vocab_size, geometry.vocab_size
    return None if own == whole else f"vocabulary {own:,} of {whole:,}"


def usual_draft_tokens(geometry: Geometry) -> int:
    """K where nobody says it: a whole block, or a chain of `CHAIN_LENGTH`."""
    return geometry.most_draft_tokens or CHAIN_LENGTH
