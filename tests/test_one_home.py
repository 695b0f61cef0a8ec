"""What stands in one place: layouts are asked for by the layouts, families by their traits."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftquant.quantize.drafts import FAMILIES
from draftquant.quantize.stored.layouts import LAYOUTS

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


def test_nothing_but_its_module_names_a_family_and_engines_ask_traits() -> None:
    names, drafts = {family.name for family in FAMILIES}, re.compile("Eagle|EAGLE|DFlash|DSpark")
    classes = {name for each in FAMILIES for name in each.architectures if drafts.search(name)}
    own = ("quantize/drafts/families/", "quantize/asking/inside/")  # of vLLM's methods
    named = {
        name: sorted(found)
        for package in ("recipes", "quantize", "calibration", "validate", "scripts")
        for path in (ROOT / package).rglob("*.py")
        if not (name := path.relative_to(ROOT).as_posix()).startswith((*own, "scripts/dev/"))
        for words in [names | classes if "/engines/" in name else names]
        if (found := {each for each in words if f'"{each}"' in path.read_text(encoding="utf-8")})
    }
    assert named == {}


def tables_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every table of a document, nested ones too."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from tables_in(each)


def test_the_sentence_of_an_error_stands_where_it_is_raised() -> None:
    assert [*tables_in({"a": [{"what": 1}]})][1:] == [{"what": 1}]
    apart = [
        path.relative_to(ROOT).as_posix()
        for package in ("recipes", "quantize", "calibration", "validate", "scripts")
        for path in sorted((ROOT / package).rglob("*.toml"))
        if any("what" in row for row in tables_in(tomllib.loads(path.read_text("utf-8"))))
    ]
    assert apart == []
