"""The drafts with sinks, features and tokens with which engines' own classes were executed."""

from pathlib import Path

import torch
from tiny import edit_json
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_nemotron
from torch import Tensor

CONTEXT, TOKENS = 11, (17, 3, 80, 41, 5, 60, 9, 33)
"""Positions before the anchor; the anchor, and the tokens recorded after it."""
CASES = ("nemotron", "both-ways")
_SIZES = {"hidden": 256, "intermediate": 512, "vocab": 512, "head_dim": 64}  # `write_target`


def features(width: int) -> Tensor:
    """[CONTEXT, width] float32 that BF16 holds: what the target's layers gave."""
    rows, columns = torch.arange(CONTEXT)[:, None], torch.arange(width)
    return ((7 * rows * (columns + 3) + 5 * columns) % 31 - 15) / 8


def write_draft(folder: Path, case: str) -> Path:
    """The draft of a case, whose embedding is the target's table of both."""
    if case == "nemotron":  # SGLang reads a window of a draft in BF16 with this key alone
        tiny_nemotron(folder, seed=3, **_SIZES)
        edit_json(folder / "config.json", use_sliding_window=True)
        return folder
    own = {"attention_sink_bias": True, "attention_value_scale": 0.6}
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}
    config = {"attention_sink_bias": True, "use_sliding_window": True, **layers}
    return tiny_dflash(folder, seed=4, num_layers=2, embed=True, own=own, config=config, **_SIZES)
