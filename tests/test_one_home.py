"""What stands in one place: reading a layout, number formats, fused linears, declarations."""

import ast
import json
import re
import typing
from pathlib import Path

import pytest
from draftquant.quantize.drafts import FAMILIES
from draftquant.quantize.files.checkpoint import Checkpoint
from draftquant.quantize.stored.layouts import LAYOUTS
from draftquant.quantize.stored.layouts.declaration_reader import Strictness
from draftquant.quantize.stored.stored_declaration import declared_scheme
from draftquant.recipes.errors import VerifyError
from handmade import MADE, quantize_by_hand
from tiny import tiny_eagle3_llama

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


def test_nobody_outside_the_layouts_asks_for_one_by_name() -> None:
    asking = [
        f"{name}:{line}"
        for path in sorted(ROOT.glob("quantize/**/*.py"))
        if not (name := path.relative_to(ROOT).as_posix()).startswith(LAYOUT_ROOMS)
        for line in comparisons_of_layouts(path.read_text(encoding="utf-8"))
    ]
    assert asking == []


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
