"""The list of most used drafts: its form, and that `published.md` is what the commands say."""

import json
from pathlib import Path

import pytest
from published_answers import COLUMNS, NOT_FOUND, PAGE_FILE, ask, page, published
from test_wild import cells
from wild_drafts import wild_drafts

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = published()
FOUND = [row for row in ROWS if row.wild is not None]
WRITTEN = PAGE_FILE.read_text(encoding="utf-8")
ROPE_READINGS = PAGE_FILE.parent / "engines" / "rope_readings.json"


def test_twenty_rows_name_entries_of_the_list_of_drafts() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) == 20
    assert {row.wild for row in FOUND} <= {draft.name for draft in wild_drafts()}
    for row in ROWS:
        assert row.claim, row.name
        assert row.stored_by is None or row.layout_as in (None, row.stored_by.layout)


def test_a_draft_without_a_config_is_said_to_have_none() -> None:
    for row in set(ROWS) - set(FOUND):
        assert row.draft is None
        assert cells(WRITTEN, row.name)[1] == NOT_FOUND


@pytest.mark.slow
@pytest.mark.parametrize("row", FOUND, ids=lambda row: row.name)
def test_the_page_is_what_the_commands_say(row: object, tmp_path: Path) -> None:
    assert row in FOUND
    assert cells(WRITTEN, row.name) == cells(page([(row, ask(row, tmp_path))]), row.name)


def test_both_engines_read_the_base_that_the_page_has() -> None:
    asked = {row["name"]: row["read"] for row in json.loads(ROPE_READINGS.read_text("utf-8"))}
    held = [row for row in FOUND if row.wild in asked]
    assert len(held) > 9
    for row in held:
        base = cells(WRITTEN, row.name)[1 + COLUMNS.index("rope")].partition(",")[0]
        for reading in asked[row.wild].values():
            assert float(f"{reading['theta']:g}") == float(base), row.name
