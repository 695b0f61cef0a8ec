"""One small DSpark draft in float64, its context and one block: what two oracles look at."""

from typing import Any

import torch
from draftquant.quantize.drafts.families.dspark import DSpark, DSparkGeometry
from reference_dflash import random_weights
from torch import Tensor

K = 5
CONTEXT = 11
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": K,
    "mask_token_id": 95,
    "target_layer_ids": [1, 3, 5],
    "markov_rank": 8,
    "markov_head_type": "vanilla",
}


def geometry_of(**changes: Any) -> DSparkGeometry:
    """Of `CONFIG` with changes."""
    return DSpark().read_geometry(CONFIG | changes, "config.json")


def weights_of(geometry: DSparkGeometry) -> dict[str, Tensor]:
    """Random ones by canonical name."""
    return random_weights(geometry, family=DSpark())


def features(geometry: DSparkGeometry) -> Tensor:
    """[1, CONTEXT, num_aux * W_target] float64."""
    width = geometry.num_aux_layers * geometry.target_hidden_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn((1, CONTEXT, width), generator=generator, dtype=torch.float64)


def tokens() -> list[int]:
    """An anchor, and K tokens behind it."""
    return [17, 3, 80, 41, 5, 60]
