"""What stands in one place: reading a layout, number formats, fused linears, declarations."""

import ast
import json
import re
import sys
import typing
from pathlib import Path

import pytest
import torch
from draftquant.quantize.drafts import FAMILIES, read_draft
from draftquant.quantize.drafts.engine_traits import FUSED_LINEARS
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.numerics.number_formats import FP4_MAX, FP8_MAX, INT4_MAX
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.stored.layouts.declaration_reader import Strictness
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.quantize.stored.stored_draft import StoredDraft
from draftquant.recipes.errors import CheckpointError, VerifyError
from draftquant.recipes.formats import NUMBER_FORMATS, WeightDtype
from draftquant.recipes.schema import LayoutName
from handmade import MADE, quantize_by_hand
from tiny import edit_json, tiny_eagle3_llama
from tiny_dflash import tiny_dflash
from tiny_llama import tiny_language_model
from tiny_mla import tiny_eagle3_mla

ROOT = Path(__file__).parents[1]
LAYOUT_ROOMS = ("quantize/layouts/", "quantize/stored/layouts/")


def comparisons_of_layouts(source: str) -> list[int]:
    """Lines that compare the name of a layout with a text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
        texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        if any("layout" in side for side in sides) and texts & set(LAYOUTS):
            found.append(node.lineno)
    return found


def test_the_search_for_comparisons_finds_them() -> None:
    source = 'if scheme.layout == "quark": ...\nx = layout.name not in ("awq", "fp8")\nlayout == y'
    assert comparisons_of_layouts(source) == [1, 2]


def test_nobody_outside_the_layouts_asks_for_one_by_name() -> None:
    asking = [
        f"{name}:{line}"
        for path in sorted(ROOT.glob("quantize/**/*.py"))
        if not (name := path.relative_to(ROOT).as_posix()).startswith(LAYOUT_ROOMS)
        for line in comparisons_of_layouts(path.read_text(encoding="utf-8"))
    ]
    assert asking == []


def test_every_layout_can_be_written_and_read() -> None:
    names = typing.get_args(LayoutName)
    assert set(LAYOUTS) == set(names)
    assert [get_layout(name).name for name in names] == list(names)
    assert [LAYOUTS[name].name for name in names] == list(names)


def test_every_number_format_has_facts() -> None:
    dtypes = set(typing.get_args(WeightDtype))
    assert set(NUMBER_FORMATS) == dtypes
    largest = {dtype: number.largest for dtype, number in NUMBER_FORMATS.items()}
    assert largest == {"int4": INT4_MAX, "fp8_e4m3": FP8_MAX, "nvfp4": FP4_MAX, "mxfp4": FP4_MAX}
    for number in NUMBER_FORMATS.values():
        stored = {"I32": torch.int32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
        bits = 8 * stored[number.stored_dtype].itemsize
        assert bits == number.bits * number.codes_per_element


@pytest.mark.parametrize(
    "made", [tiny_eagle3_llama, tiny_eagle3_mla, tiny_dflash, tiny_language_model]
)
def test_a_draft_has_all_members_of_a_fused_linear_or_none(
    made: typing.Callable[[Path], Path], tmp_path: Path
) -> None:
    draft = read_draft(Checkpoint.open(made(tmp_path / "draft")))
    leaves = {row.module.rpartition(".")[2] for row in draft.linears()}
    for fused in FUSED_LINEARS:
        assert set(fused.members) <= leaves or not leaves & set(fused.members)
    layers = draft.geometry.num_layers
    assert [len(group) for group in sorted(draft.fused_groups(), key=len)] == (
        [2] * layers + [2 if draft.family.name == "eagle3-mla" else 3] * layers
    )


def test_the_families_that_are_tested_are_all() -> None:
    assert {family.name for family in FAMILIES} == {
        "eagle3-llama", "eagle3-mla", "dflash", "dflash2", "dspark", "language-model",
        "mimo-mtp", "deepseek-mtp", "glm4-moe-mtp", "qwen3-next-mtp", "step3p5-mtp",
    }  # fmt: skip


def texts_in(source: str) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_engines_ask_traits_and_name_no_family() -> None:
    names = {family.name for family in FAMILIES}
    drafts = re.compile("Eagle|EAGLE|DFlash|DSpark")
    names |= {name for each in FAMILIES for name in each.architectures if drafts.search(name)}
    assert texts_in('x = family == "dflash"\ny = "DFlashDraftModel"') <= names
    named = {
        path.relative_to(ROOT).as_posix(): sorted(found)
        for path in (ROOT / "quantize" / "engines").rglob("*.py")
        if (found := names & texts_in(path.read_text(encoding="utf-8")))
    }
    assert named == {}


def test_every_family_tells_engines_what_it_is_like() -> None:
    for family in FAMILIES:
        own = vars(sys.modules[type(family).__module__])["ENGINE_TRAITS"]
        assert family.engine_traits is own, family.name


NAMING = {"mxfp4": 5, "nvfp4": 6, "int4": 8, "fp8_e4m3": 16}
"""Product files in which the name of a format stands as a text: these numbers only shrink.

They are the tables of formats, layouts, engines, GPUs and other tools' schemes, and the vendors'
own spellings.
"""


def test_few_product_files_name_a_format() -> None:
    texts = [
        texts_in(path.read_text(encoding="utf-8"))
        for package in ("recipes", "quantize", "calibration", "validate", "scripts")
        for path in (ROOT / package).rglob("*.py")
        if "dev" not in path.parts
    ]
    assert {name: sum(name in each for each in texts) for name in NAMING} == NAMING
    assert set(NAMING) == set(NUMBER_FORMATS)


# ---- one reader of declarations


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_eagle3_llama(tmp_path_factory.mktemp("one-home") / "source")


def understood(folder: Path) -> set[Strictness]:
    """How strictly a declaration may be read without an error."""
    found = set()
    for strictness in typing.get_args(Strictness):
        try:
            declared_scheme(Checkpoint.open(folder), strictness=strictness)
        except VerifyError:
            continue
        found.add(strictness)
    return found


@pytest.mark.parametrize(
    ("made", "edit", "as_strictly_as"),
    [
        ("quark-int4", {}, {"folder", "declaration", "engine"}),
        ("quark-int4", {"exclude": ["re:(fc"]}, {"engine"}),
        ("quark-int4", {"exclude": "fc"}, set()),
        ("quark-int4", {"surprise": 1}, set()),
        ("modelopt-fp8", {"ignore": ["other"]}, set()),
        ("modelopt-fp8", {"ignore": ["a"], "exclude_modules": ["a"]},
         {"declaration", "engine"}),
    ],
)  # fmt: skip
def test_strictness_of_reading(
    source: Path, tmp_path: Path, made: str, edit: dict[str, object], as_strictly_as: set[str]
) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE[made])
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= edit
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert understood(out) == as_strictly_as


# ---- one StoredDraft


def test_a_draft_is_the_same_however_it_is_opened(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantize_by_hand(source, tmp_path / "out", MADE["quark-int4"]))
    read, looked = StoredDraft.read(checkpoint), StoredDraft.look(checkpoint)
    assert read.draft.rows == looked.draft.rows
    assert read.modules == looked.modules
    assert sum(map(read.is_quantized, read.draft.rows)) == 7
    assert looked.scheme is None


def test_only_a_look_opens_what_is_not_as_declared(source: Path, tmp_path: Path) -> None:
    out = quantize_by_hand(source, tmp_path / "out", MADE["quark-int4"])
    edit_json(out / "config.json", quantization_config=None)
    checkpoint = Checkpoint.open(out)
    with pytest.raises(CheckpointError):
        StoredDraft.read(checkpoint)
    assert len(StoredDraft.look(checkpoint).modules) == 7
