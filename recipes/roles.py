"""What a tensor of a draft is for: what rules of recipes go by, whatever a family calls it."""

from typing import Literal

Role = Literal[
    "attention",
    "mlp",
    "kv_up",
    "fusion",
    "embedding",
    "head",
    "norm",
    "vocabulary_map",
    "mask",
    "proposal",
    "router",
]
LAYER_ROLES: tuple[Role, ...] = ("attention", "mlp")
"""Linears of decoder layers: what `expect` counts."""
QUANTIZABLE: tuple[Role, ...] = (*LAYER_ROLES, "fusion", "head")
"""What a rule may quantize; the last two by explicit choice, which no recipe makes unasked."""
SHARED_ROLES: tuple[Role, ...] = ("embedding", "head")
"""What a rule may drop: tables that engines take from the target where the draft has none."""
