"""The numbers that shapes and maths follow from, with the usual values.

A family's own geometry adds fields, and overrides what its drafts do differently.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...recipes.errors import CheckpointError
from .rope import RopeConfig

CHAIN_LENGTH = 3
"""Tokens of a chain, which has no length of its own, as it is usually served."""
SIZE_KEY = "draft_vocab_size"
"""Key at the top level of config.json in every layout: the rows of the head. SpecForge, ModelOpt,
speculators, vLLM and SGLang use it and the next two tables for EAGLE-3, DFlash and DSpark."""
MAP = "d2t"
"""Canonical name of the table from draft ids to target ids, as offsets: target id - draft id."""
MASK = "t2d"
"""Canonical name of the table that marks the target ids which have a row."""


class TokenLimit(NamedTuple):
    """The most tokens that a draft can propose, and why no more."""

    tokens: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Query heads that share heads of keys and values; widths in elements.

    Attributes:
        rotary_dim: number of elements of a head that are rotated, the first ones.
        qk_norm: each head's query and key is normed before it is rotated, as in Qwen3.
        input_bias: q, k and v have biases, as in Qwen2. output_bias: o has one.
        gate: what the sigmoid of a gate multiplies the output by: "elements", from q_proj after the
            query of each head (Qwen3-Next); "heads", one number of g_proj for each (Step-3.5).
        sinks: each head has a logit of its own, which takes weight from the keys and gives none.
        value_scale: multiplies the values before they are cached.
    """

    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool = False
    input_bias: bool = False
    output_bias: bool = False
    gate: Literal["elements", "heads"] | None = None
    sinks: bool = False
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """What chooses the positions that sparse attention (DSA) reads; widths in elements.

    `most`: so many it chooses, and attention over no more is MLA's. `chooses_once`: later steps of
    a chain read what the first one chose, so none of them sees its own position or another's.
    """

    num_heads: int
    head_dim: int
    most: int
    chooses_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA; all heads share the rotated part of a key; widths in elements.

    `rope_interleave`: neighbouring dimensions turn together (vLLM 0.33 always does so, SGLang
    0.5.23 as the config says).
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    indexer: Indexer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What every draft has; widths in elements.

    Attributes:
        vocab_size: tokens of the target's vocabulary; the draft can propose `draft_vocab_size`.
        rope: how queries and keys are rotated; None where there are none.
        num_aux_layers: how many target layers are concatenated into the input of fc.
        aux_layer_ids: target layers that it reads (0-based, after the layer); None = default.
        fuses: it has an fc over layers; False where it reads the target's last hidden state.
        block_size: anchor and mask tokens of one block; None for a draft that proposes a chain.
        mask_token_id: the token in the place of tokens to fill in; None where there is none.
        attention: that of its layers; None where they have none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig | None
    draft_vocab_size: int
    target_hidden_size: int
    num_aux_layers: int
    aux_layer_ids: tuple[int, ...] | None
    fuses: bool = True
    block_size: int | None = None
    mask_token_id: int | None = None
    attention: GroupedAttention | LatentAttention | None = None

    @property
    def most_draft_tokens(self) -> int | None:
        """Tokens that a whole block, or all heads, propose; None for a chain."""
        return None

    @property
    def token_limit(self) -> TokenLimit | None:
        """The limit that refuses a replay with more draft tokens; None where there is none."""
        return None

    @property
    def indexer(self) -> Indexer | None:
        """That of sparse attention; None where all positions are read."""
        return self.attention.indexer if isinstance(self.attention, LatentAttention) else None

    @property
    def normed_heads(self) -> bool:
        """Whether each head's query and key is normed, as in layers of Qwen3."""
        return isinstance(self.attention, GroupedAttention) and self.attention.qk_norm

    @property
    def reads_layers(self) -> bool:
        """False for a draft that reads the target's last hidden state, after the final norm.

        Traces hold that state as "fused" features, without an fc.
        """
        return self.fuses

    @property
    def reads_features(self) -> bool:
        """False for a draft that reads only tokens."""
        return True

    @property
    def parallel(self) -> bool:
        """True where all tokens of a chain are drafted in one pass, after mask tokens."""
        return False

    @property
    def num_modules(self) -> int:
        """Number of modules, one per draft step; 1 = all steps use the same one."""
        return 1

    def window_of(self, layer: int) -> int | None:  # noqa: ARG002 - where layers differ
        """Positions that a query of a layer sees, including its own; None = all."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedGeometry(Geometry):
    """Geometry of a draft whose layers have attention."""

    rope: RopeConfig
    attention: GroupedAttention | LatentAttention  # pyright: ignore[reportGeneralTypeIssues]


def last_state(sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a chain over the target's whole vocabulary and width, without an fc over layers.

    It reads the target's last hidden state, after the final norm, or only tokens.
    """
    return {
        **sizes,
        "draft_vocab_size": sizes["vocab_size"],
        "target_hidden_size": sizes["hidden_size"],
        "num_aux_layers": 1,
        "aux_layer_ids": None,
        "fuses": False,
    }


def needed_mask(geometry: Geometry) -> int:
    """The token in the place of tokens to fill in."""
    if geometry.mask_token_id is None:
        raise CheckpointError(
            "config.json",
            "mask_token_id: missing key, which says what stands where the draft fills in a token",
            fix="add 'mask_token_id' as the draft was trained with it",
        )
    return geometry.mask_token_id


def vocabulary_share(geometry: Geometry) -> str | None:
    """The share of the target's tokens that a draft can propose, in words; None where it is all."""
    part, whole = geometry.draft_vocab_size, geometry.vocab_size
    return None if part == whole else f"vocabulary {part:,} of {whole:,}"


def usual_draft_tokens(geometry: Geometry) -> int:
    """K where nobody gives it: a whole block, or a chain of `CHAIN_LENGTH`."""
    return geometry.most_draft_tokens or CHAIN_LENGTH
