"""Every built-in recipe on EAGLE-3 MLA drafts, from the plan to verification."""

from pathlib import Path
from typing import Any

import pytest
from by_recipe import quantized
from data_free import LAYERS_ALONE
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.verify import verify
from tiny import read_tensors
from tiny_mla import tiny_eagle3_mla
from wide import dimensions

QUANTIZED = {
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}


def read(folder: Path) -> Draft:
    return read_draft(Checkpoint.open(folder))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_eagle3_mla(tmp_path / "draft")


VARIANTS: dict[str, dict[str, Any]] = {
    "torchspec": {},
    "torchspec-vllm": {"prefix": "layers.0."},
    "modelopt": {"modelopt": True},
    "model-prefix-sharded": {"prefix": "model.layers.0.", "sharded": True},
    "pruned-without-embedding": {"pruned_vocabulary": True, "embed": False, "head": False},
    "three-layers": {"num_layers": 3},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "float16": {"dtype": "F16"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", LAYERS_ALONE)
def test_every_recipe_on_every_variant(tmp_path: Path, recipe: str, variant: str) -> None:
    """Seven linears per layer are quantized; kv_b_proj and all else stay byte for byte."""
    wide = dimensions("eagle3-mla", recipe)
    source = tiny_eagle3_mla(tmp_path / "draft", **VARIANTS[variant] | wide)
    report = quantized(source, recipe, tmp_path / "out")
    assert report.verification.ok
    assert verify(tmp_path / "out", source).ok
    _assert_roles_are_kept(source, tmp_path / "out")


def _assert_roles_are_kept(source: Path, out: Path) -> None:
    before, after = read_tensors(source), read_tensors(out)
    quantized = {row.tensor.name for row in read(source).rows if row.role in ("attention", "mlp")}
    assert {name for name in before if before[name] != after.get(name)} == quantized
    layers = read(source).geometry.num_layers
    assert len(quantized) == 7 * layers
    leaves = {".".join(name.split(".")[-3:-1]) for name in quantized}
    assert leaves == QUANTIZED
    assert sum(name.endswith("kv_b_proj.weight") for name in after) == layers
