"""What is known of the inputs of a plan's linears before its first tensor is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..recipes.seen_prompts import NO_PROMPTS, SeenPrompts
from .drafts.kv_cache import CacheScales

if TYPE_CHECKING:
    from .algorithms import FoundCodes, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of calibration, or of the user.

    Attributes:
        input_scales: static activation scale per on-disk module name; needed exactly where the
            recipe's activations are static.
        input_scale_origin: where they came from, for provenance; None = nobody said it.
        cache_scales: of the KV cache, by number of the layer; needed exactly where the recipe
            stores measured ones.
        statistics: of inputs, for algorithms that need them.
        found: codes and scales, for algorithms that need them.
        prompts: that were looked at, for provenance.
    """

    input_scales: Mapping[str, float] = field(default_factory=dict)
    input_scale_origin: str | None = None
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)
    statistics: "Statistics | None" = None
    found: "FoundCodes | None" = None
    prompts: SeenPrompts = NO_PROMPTS


NOTHING_MEASURED = Measured()
