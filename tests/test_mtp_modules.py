"""MTP drafts of several modules: names, the way through the commands, and layer i in step i.

The oracle is transformers' own decoder layers, put together as vLLM 0.33 serves them
(`v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py`): in step i all rows go through module
i, each with the token one further on, the position it had, and what module i - 1 gave.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.loading import load_draft
from draftquant.recipes.errors import CheckpointError
from reference_mtp import ReferenceModules
from test_mtp import compare
from tiny import edit_json
from tiny_mtp import tiny_deepseek_mtp, tiny_glm4_moe_mtp, tiny_step3p5_mtp

pytestmark = pytest.mark.slow

BUILDERS: dict[str, Callable[..., Path]] = {
    "deepseek-mtp": tiny_deepseek_mtp,
    "glm4-moe-mtp": tiny_glm4_moe_mtp,
    "step3p5-mtp": tiny_step3p5_mtp,
}


@pytest.mark.usefixtures("float64_on_one_thread")
@pytest.mark.parametrize("family", BUILDERS)
def test_step_i_is_module_i(family: str, tmp_path: Path) -> None:
    folder = BUILDERS[family](tmp_path / "draft", modules=3, dtype="F32")
    draft = load_draft(folder, dtype=torch.float64)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    compare(draft, ReferenceModules(family, config, draft.weights), block_rows=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types: expected a list over 3 layers"),
        (
            {"layer_types": [*["sliding_attention"] * 4, "full_attention", "full_attention"]},
            "layer_types: expected the same of all modules",
        ),
        ({"moe_layers_enum": "1,2,4"}, "moe_layers_enum: asks of the layers 3 to 5"),
        ({"partial_rotary_factors": [0.25] * 6}, "partial_rotary_factors: expected 0.5 or 1"),
        ({"rope_theta": [1e4, 1e4, 1e4, 1e4, 1e6, 1e4]}, "rope_theta: expected the same"),
        ({"sliding_window": None}, "sliding_window: missing key"),
        ({"num_nextn_predict_layers": 2}, "no tensor of step3p5-mtp"),
    ],
)
def test_bad_configs_of_step(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = tiny_step3p5_mtp(tmp_path / "draft")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=said):
        read_draft(Checkpoint.open(folder))
