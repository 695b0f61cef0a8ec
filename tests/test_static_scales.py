"""Static input scales by the names on disk: one constant, and recipes that take none."""

from pathlib import Path

import pytest
from draftquant.calibration.linear_inputs.static_scales import constant_scales
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.provenance import NO_PROMPTS
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import BackendError
from tiny import tiny_eagle3_llama
from tiny_mla import tiny_eagle3_mla


@pytest.mark.parametrize("make", [tiny_eagle3_llama, tiny_eagle3_mla])
def test_a_constant_scale_goes_to_every_quantized_linear(make: object, tmp_path: Path) -> None:
    assert callable(make)
    draft = read_draft(Checkpoint.open(make(tmp_path / "draft")))
    plan = make_plan(load_recipe("blackwell-fp8-mla"), draft)
    found = constant_scales(plan, 0.5)
    assert found.input_scales == dict.fromkeys((step.row.module for step in plan.quantized), 0.5)
    assert (found.input_scale_origin, found.prompts) == ("--input-scale", NO_PROMPTS)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BackendError, match=r"--input-scale: expected a positive number, got"):
            constant_scales(plan, wrong)
