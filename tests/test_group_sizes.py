"""Group sizes that do not divide: the error names those that do, and they work."""

from dataclasses import replace
from pathlib import Path

import pytest
from draftquant.quantize.drafts import Draft, read_draft
from draftquant.quantize.engines.engine_check import check_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.verify import verify
from draftquant.recipes import built_in_recipes, load_recipe
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


GROUPED = [
    name
    for name in built_in_recipes()
    if any(form.weights.granularity == "group" for form in load_recipe(name).formats)
]


@pytest.mark.parametrize(("intermediate", "size"), [(320, 64), (96, 32), (72, None)])
@pytest.mark.parametrize("base", GROUPED)
def test_the_recipe_that_the_error_prints_works(
    base: str, intermediate: int, size: int | None, tmp_path: Path
) -> None:
    draft = draft_of(tmp_path / "draft", intermediate)
    if size is None:  # no groups fit: the recipes that the fix names do
        with pytest.raises(LayoutError, match="no groups of") as caught:
            make_plan(load_recipe(base), draft)
        named = [word for word in caught.value.fix.split() if word in built_in_recipes()]
        assert [bool(make_plan(load_recipe(name), draft)) for name in named] == [True, True]
        return
    if load_recipe(base).weights.dtype != "int4":
        assert make_plan(load_recipe(base), draft)  # groups of 16 and 32 fit
        return
    with pytest.raises(LayoutError) as caught:
        make_plan(load_recipe(base), draft)
    assert "write these lines into mine.yaml" in caught.value.fix
    mine = tmp_path / "mine.yaml"
    printed = str(caught.value).split("\n")[1:-1]
    mine.write_text("\n".join(printed), encoding="utf-8")
    found, shipped = load_recipe(mine), load_recipe(base)
    sizes = [each.weights.group_size for each in found.formats]
    assert sizes == [size, *(each.weights.group_size for each in shipped.formats[1:])]
    same = replace(shipped, name="mine", summary=found.summary, weights=found.weights)
    assert found == same
    plan = make_plan(found, draft)
    assert len(printed) <= 5 or base.endswith("-head")
    if shipped.algorithm.rounding == "nearest":
        folder = draft.checkpoint.folder
        quantize_draft(plan, tmp_path / "out", source=DraftSource(folder=folder))
        assert not verify(tmp_path / "out", folder).faults
        assert check_draft(tmp_path / "out", engine="vllm", arch="sm90").verdict == "LOADS"
