"""The table of loading in experiments/engines.md is what results.json and `check` say."""

import sys
from pathlib import Path
from typing import Any

import pytest
from data_free import LAYERS_ALONE

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

import engines_page  # noqa: E402


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[Any, str]]:
    cases, said = engines_page.predictions(tmp_path_factory.mktemp("table"))
    return cases, dict(said)


@pytest.fixture(scope="module")
def written(predictions: tuple[list[Any], dict[Any, str]]) -> str:
    return engines_page.table(*predictions)


@pytest.mark.slow
def test_the_page_has_the_table_of_today(written: str) -> None:
    text = engines_page.PAGE.read_text(encoding="utf-8")
    again = "run: python experiments/engines/engines_page.py"
    assert engines_page.with_table(text, written) == text, again


@pytest.mark.slow
def test_every_recipe_has_a_row_for_every_family(written: str) -> None:
    recipes = set(LAYERS_ALONE)  # the files of the others have the same form
    rows: dict[str, list[str]] = {}
    for line in written.splitlines()[2:]:
        if line.startswith("| `"):
            _, recipe, families, *cells, _ = (cell.strip() for cell in line.split("|"))
            assert len(cells) == 5
            rows.setdefault(recipe.strip("`"), []).extend(families.split(", "))
    assert rows.keys() == recipes | {"unquantized"}
    for families in rows.values():
        assert sorted(families) in (["all"], sorted(engines_page.FAMILIES))


@pytest.mark.slow
def test_a_wrong_prediction_is_marked_and_counted(
    predictions: tuple[list[Any], dict[Any, str]],
) -> None:
    cases, said = predictions
    one = next(place for name, place in said if name == "dflash--mi325x-fp8")
    marked = engines_page.table(cases, said | {("dflash--mi325x-fp8", one): "REFUSED"})
    assert "loads ✗ REFUSED; 2 shards: loads |" in marked
    right, wrong = (
        int(text.split("predicted ")[1].split()[0])
        for text in (engines_page.table(cases, said), marked)
    )
    assert right == wrong + 1


@pytest.mark.slow
def test_a_page_without_marks_is_an_error(written: str) -> None:
    with pytest.raises(ValueError, match="expected the marks"):
        engines_page.with_table("# draftquant", written)
