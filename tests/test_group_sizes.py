"""Group sizes that do not divide: the error names those that do, and they work."""

from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.errors import LayoutError
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.quantize_draft import quantize_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import load_recipe
from tiny import tiny_eagle3_llama


def draft_of(folder: Path, intermediate: int) -> Draft:
    """As gpt-oss drafts: hidden 2880 is 22.5 groups of 128, here 192 is 1.5."""
    tiny_eagle3_llama(folder, hidden=192, intermediate=intermediate, head_dim=64)
    return read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("intermediate", "fix"),
    [
        (320, "groups of 64 or 32 fit every linear: write a recipe with 'extends: int4-group128'"),
        (96, "groups of 32 fit every linear"),
        (72, "no groups of int4 fit: keep this tensor, or use a scale per channel"),
    ],
)
def test_the_sizes_that_fit_all_linears_are_named(
    intermediate: int, fix: str, tmp_path: Path
) -> None:
    draft = draft_of(tmp_path / "draft", intermediate)
    with pytest.raises(LayoutError) as caught:
        make_plan(load_recipe("int4-group128"), draft)
    assert caught.value.where == "midlayer.mlp.down_proj.weight"
    assert caught.value.what.endswith(f"needs a multiple of 128 inputs, got {intermediate}")
    assert fix in caught.value.fix


@pytest.mark.parametrize(("intermediate", "size"), [(320, 64), (96, 32)])
@pytest.mark.parametrize("base", ["int4-group128", "mi325x-int4-awq"])
def test_the_recipe_that_the_fix_names_works(
    base: str, intermediate: int, size: int, tmp_path: Path
) -> None:
    draft = draft_of(tmp_path / "draft", intermediate)
    with pytest.raises(LayoutError) as caught:
        make_plan(load_recipe(base), draft)
    extends, weights = caught.value.fix.split("'")[1::2]
    assert weights == f"weights: {{group_size: {size}}}"
    own = tmp_path / "own.yaml"
    own.write_text(f"{extends}\nname: own\n{weights}\n", encoding="utf-8")
    plan = make_plan(load_recipe(str(own)), draft)
    folder = draft.checkpoint.folder
    quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
    assert not verify(tmp_path / "out", folder).faults
    assert check_draft(tmp_path / "out", engine="vllm", arch="sm90").verdict == "LOADS"


def test_a_format_per_channel_needs_no_groups(tmp_path: Path) -> None:
    assert make_plan(load_recipe("fp8-ptpc"), draft_of(tmp_path / "draft", 72)).quantized
