"""What rows of findings.toml may ask of a pair, and quote."""

from dataclasses import dataclass

Quoted = str | None
"""What a sentence says of something; None where there is no such thing."""


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """The facts of a pair, and below those of one engine, which are absent without one."""

    is_whole_model: bool
    drafts_blocks: bool

    # What the draft reads: `features`.
    unfit_width: Quoted
    unfit_layers: Quoted
    named: int | None
    depth: int
    is_of_other_depth: bool
    outputs: list[int]
    takes_default_layers: bool
    own_tokens: int
    their_tokens: int
    has_other_tokens: bool
    size: int | None
    is_padded: bool
    mask: int | None
    mask_is_outside: bool
    last_mapped: int | None
    difference: Quoted
    has_other_template: bool
    unlike: str

    # Positions and shards: `serving_limits`.
    own_rotation: str
    their_rotation: str
    own_kind: str
    only_sizes_a_table: bool
    rotates_otherwise: bool
    tp: int
    allowed: str
    undivided: str

    # dtypes: `dtypes`.
    own_dtype: Quoted
    their_dtype: Quoted
    cast: Quoted
    is_cast: bool
    given: Quoted
    splits_dtypes: bool
    said: str
    beyond: Quoted
    feature: float | None

    # What it inherits: `inherited`.
    inherited_method: Quoted
    declared: Quoted
    mixed: Quoted
    borrows_head: bool
    head_is_unread: bool
    head_is_quantized: bool
    dropped_layers: Quoted
    rotated_by: Quoted
    transformers_mtp: int | None

    # In one engine.
    title: str = ""
    is_narrow: bool = False
    is_short: bool = False
    served: int | None = None
    own_length: int | None = None
    flag: Quoted = None
    asked: int | None = None
    made: int | None = None
    is_beyond_target: bool = False
    cache: Quoted = None
    cache_said: str = ""
    scales: str = ""
    keeps_cache: Quoted = None
