"""A vocabulary cut before or after quantizing: equal bytes, and whole records in both orders."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cuts import cut
from draftquant.quantize.drafts import read_draft
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.files.digests import tensor_digests
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.files.lineage import cuts_of, quantization_of, sources_of
from draftquant.quantize.files.provenance_file import read_provenance
from draftquant.quantize.quantization_plan import make_plan
from draftquant.quantize.quantize_draft import quantize_draft
from draftquant.quantize.verify import verify
from draftquant.recipes import Recipe, Rule, load_recipe
from tiny import tiny_eagle3_llama
from tiny_dspark import tiny_dspark

pytestmark = pytest.mark.usefixtures("one_thread")
HEAD = "lm_head.weight"


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
    "fp8, head kept": load_recipe("fp8-ptpc"),
    "int4 per group, head kept": load_recipe("int4-group128"),
    "fp8 per channel, head too": with_head(load_recipe("fp8-ptpc")),
    "int4 per channel, head too": with_head(load_recipe("int4-channel")),
}
DRAFTS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: tiny_eagle3_llama(
        folder, hidden=128, intermediate=128, head_dim=32, sharded=True
    ),
    "dspark": lambda folder: tiny_dspark(folder, hidden=128, head=True, intermediate=128),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("draft", DRAFTS)
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
