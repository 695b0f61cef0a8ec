"""A vocabulary cut before or after quantizing: equal bytes, and whole records in both orders."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuts import cut, target
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import tensor_digests
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.provenance_file import (
    cuts_of,
    quantization_of,
    read_provenance,
    sources_of,
)
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.planning.quantization_plan import make_plan
from draftquant.quantize.verify import verify
from draftquant.quantize.vocabulary.cut_plan import cut_config
from draftquant.recipes import Recipe, Rule, load_recipe
from draftquant.recipes.errors import CheckpointError, LayoutError
from tiny import tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_dspark import tiny_dspark
from verify_cases import edit, flip_bit

pytestmark = pytest.mark.usefixtures("one_thread")


def with_head(recipe: Recipe) -> Recipe:
    """The same, with the head quantized as the layers are."""
    rules = (
        Rule(role=rule.role, action="quantize") if "head" in rule.role else rule
        for rule in recipe.rules
    )
    return replace(recipe, rules=tuple(rules))


def quantize(source: Path, out: Path, recipe: Recipe) -> Path:
    plan = make_plan(recipe, read_draft(Checkpoint.open(source)))
    quantize_draft(plan, out, source=DraftSource(folder=source))
    return out


def same_folders(a: Path, b: Path) -> None:
    """Every tensor and every document, but for the records and what people read."""
    files = sorted(p.name for p in a.iterdir())
    assert files == sorted(p.name for p in b.iterdir())
    for name in files:
        if name not in ("draftquant.json", "README.md"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


RECIPES: dict[str, Recipe] = {
    "int4 per group, head kept": load_recipe("int4-group128"),
    "fp8 per channel, head too": with_head(load_recipe("fp8-ptpc")),
}
DRAFTS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: tiny_eagle3_llama(
        folder, hidden=128, intermediate=128, head_dim=32, sharded=True
    ),
    "dspark": lambda folder: tiny_dspark(folder, hidden=128, head=True, intermediate=128),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("draft", "name"), list(zip(("dspark", "eagle3"), RECIPES, strict=True)))
def test_either_order_gives_equal_bytes_and_whole_records(
    draft: str, name: str, tmp_path: Path
) -> None:
    source, recipe = DRAFTS[draft](tmp_path / "draft"), RECIPES[name]
    cut(source, tmp_path / "cut")
    cut_first = quantize(tmp_path / "cut", tmp_path / "cut-quantized", recipe)
    quantize(source, tmp_path / "quantized", recipe)
    cut_last = tmp_path / "quantized-cut"
    cut(tmp_path / "quantized", cut_last)
    same_folders(cut_first, cut_last)
    for out, before in ((cut_first, "cut"), (cut_last, "quantized")):
        for against in (tmp_path / before, source):
            report = verify(out, against)
            assert report.ok, report.faults
        record = read_provenance(out)
        assert [str(each) for each in cuts_of(record)] == ["vocabulary 20 of 96"]
        found = quantization_of(record)
        assert found is not None
        assert found.recipe == recipe
        assert tensor_digests(Checkpoint.open(source)) in list(sources_of(record))


def shared(recipe: Recipe, **weights: Any) -> Recipe:
    return replace(recipe, weights=replace(recipe.weights, **weights))


SHARED: dict[str, Recipe] = {
    "one scale": shared(with_head(load_recipe("fp8-ptpc")), granularity="tensor"),
    "a scale over those of groups": with_head(load_recipe("nvfp4-weights")),
}


@pytest.mark.parametrize("name", SHARED)
def test_rows_that_share_their_scales_are_cut_first(name: str, tmp_path: Path) -> None:
    source = tiny_eagle3_llama(
        tmp_path / "draft", hidden=128, intermediate=128, head_dim=32, vocab=128
    )
    quantized = quantize(source, tmp_path / "quantized", SHARED[name])
    with pytest.raises(LayoutError) as caught:
        cut(quantized, tmp_path / "cut")
    assert caught.value.fix == "cut first, then quantize"


def test_rows_of_the_targets_head_in_either_order(tmp_path: Path) -> None:
    source, model = tiny_dflash(tmp_path / "draft"), target(tmp_path / "target")
    cut(source, tmp_path / "cut", target=model)
    cut_first = quantize(tmp_path / "cut", tmp_path / "a", load_recipe("fp8-ptpc"))
    edit(tmp_path / "cut", lambda t: t.update({"norm.weight": flip_bit(t["norm.weight"], 3)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight: not the bytes whose digest"):
        quantize(tmp_path / "cut", tmp_path / "out", load_recipe("fp8-ptpc"))
    quantized = quantize(source, tmp_path / "quantized", load_recipe("fp8-ptpc"))
    cut(quantized, tmp_path / "b", target=model)
    same_folders(cut_first, tmp_path / "b")
    assert verify(tmp_path / "b", quantized).ok
    for out in (cut_first, tmp_path / "b"):
        assert verify(out, source, target=model).ok
        with pytest.raises(CheckpointError, match="the rows are its target's"):
            verify(out, source)


def test_the_size_stands_behind_the_vocabulary_wherever_it_stood() -> None:
    """A fix of config.json may have put it last, before the draft was cut or after."""
    key = "draft_vocab_size"
    for config in ({key: 96, "vocab_size": 96, "a": 1}, {"vocab_size": 96, "a": 1, key: 96}):
        assert list(cut_config(config, 20)) == ["vocab_size", key, "a"]
    layered = {"transformer_layer_config": {"vocab_size": 96}, "quantization_config": {}}
    assert list(cut_config(layered, 20))[1:] == [key, "quantization_config"]
