"""Group sizes that do not divide: the error names those that do, and they work."""

from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.recipes import load_recipe
from draftquant.recipes.errors import LayoutError
from tiny import tiny_eagle3_llama


def draft_of(folder: Path, intermediate: int) -> Draft:
    """As gpt-oss drafts: hidden 2880 is 22.5 groups of 128, here 192 is 1.5."""
    tiny_eagle3_llama(folder, hidden=192, intermediate=intermediate, head_dim=64)
    return read_draft(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("intermediate", "fix"),
    [
        (320, "groups of 64 or 32 fit every linear: write these lines into mine.yaml, and give"),
        (96, "groups of 32 fit every linear"),
        (72, "no groups of int4 fit: take a recipe with a scale per channel, such as int4-channel"),
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
