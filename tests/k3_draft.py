"""The drafts of vLLM's K3DSparkForCausalLM; features and tokens of all that was executed."""

from pathlib import Path
from typing import Any

import torch
from tiny_dspark import tiny_dspark_mla
from torch import Tensor

CONTEXT, TOKENS = 11, (17, 3, 80, 41, 5, 60, 9, 33)
"""Positions before the anchor; the anchor, and the tokens recorded after it."""
CASES: dict[str, dict[str, Any]] = {
    "published": {},
    "causal": {"is_causal": True},
    "no-yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}},
}
SHAPE = {"hidden": 256, "intermediate": 512, "vocab": 512}  # of `asking.write_target`


def features(width: int) -> Tensor:
    """[CONTEXT, width] float32 that BF16 holds: what the target's layers gave."""
    rows, columns = torch.arange(CONTEXT)[:, None], torch.arange(width)
    return ((7 * rows * (columns + 3) + 5 * columns) % 31 - 15) / 8


def write_draft(folder: Path, case: str) -> Path:
    """The draft of a case, whose embedding is the target's table of both."""
    return tiny_dspark_mla(folder, seed=3, embed=True, config=CASES[case], **SHAPE)
