"""What `check` says of folders that other tools made, beside what the engines did with them.

A sample of tests/engines/FOREIGN.md: one folder of each scheme of each tool, headers only.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ENGINES_FOLDER = Path(__file__).parent / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

import foreign_sample  # noqa: E402

ROWS = foreign_sample.read_sample()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["draft"])
def test_check_says_what_the_engines_did(row: dict[str, Any], tmp_path: Path) -> None:
    wrong = [
        f"{asked}: {said.verdict} ({said.error}), not {verdict}"
        for asked, verdict, said in foreign_sample.predictions(row, tmp_path)
        if said.verdict != verdict
    ]
    assert wrong == []


def test_the_sample_has_every_tool_and_every_answer() -> None:
    tools = {row["draft"].rpartition("/")[2].partition("--")[0] for row in ROWS}
    assert tools == {
        "autoawq",
        "compressed-tensors",
        "llm-compressor",
        "modelopt",
        "oneshot",
        "quark",
    }
    answers = Counter({verdict for row in ROWS for verdict in row["answers"]})
    assert answers.keys() == {"LOADS", "LOADS BUT WRONG", "REFUSED"}
