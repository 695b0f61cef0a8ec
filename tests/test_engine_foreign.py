"""What `check` says of folders that other tools made, beside what the engines did with them.

A sample of experiments/engines/FOREIGN.md: one folder of each scheme of each tool; and folders
that were drawn by a seed (foreign_mix.json); headers only.
"""

import copy
import itertools
import json
import sys
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draftquant.quantize.engines.contract import Verdict
from draftquant.recipes import DraftQuantError

ENGINES_FOLDER = Path(__file__).parents[1] / "experiments" / "engines"
sys.path.append(str(ENGINES_FOLDER))  # its modules stand alone

import folder_rows  # noqa: E402

ROWS = folder_rows.read_rows()
DRAWN = json.loads((ENGINES_FOLDER / "foreign_mix.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", [*ROWS, *DRAWN["rows"]], ids=lambda row: row["draft"])
def test_check_says_what_the_engines_did(row: dict[str, Any], tmp_path: Path) -> None:
    """Of what no tool wrote it may say that it does not know."""
    unsure = ("UNKNOWN",) if row in DRAWN["rows"] else ()
    wrong = [
        f"{asked}: {said.verdict} ({said.error}), not {verdict}"
        for asked, verdict, said in folder_rows.predictions(row, tmp_path)
        if said.verdict not in (verdict, *unsure)
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


def test_the_drawn_folders_ask_both_engines_on_every_gpu() -> None:
    asked = {
        tuple(each.split()[:2])
        for row in DRAWN["rows"]
        for questions in row["answers"].values()
        for each in questions
    }
    gpus = ("sm80", "sm90", "sm100", "gfx942", "gfx950")
    assert asked == set(itertools.product(("vllm", "sglang"), gpus))
    verdicts = {verdict for row in DRAWN["rows"] for verdict in row["answers"]}
    assert verdicts == {"LOADS", "LOADS BUT WRONG", "REFUSED"}


JUNK: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "x", [], {}, [None], {"a": 1}, [{}, {}])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@pytest.mark.parametrize("seed", range(10))
def test_a_declaration_of_any_shape_is_answered_or_refused(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    row = copy.deepcopy(random.choice([row for row in ROWS if len(row["answers"]) == 1]))
    for _ in range(5):
        declared = row["config"].get("quantization_config") or row["config"]
        container, key = random.choice(list(places(declared)))
        container[key] = copy.deepcopy(random.choice(JUNK))
        with suppress(DraftQuantError):
            said = [answer.verdict for *_, answer in folder_rows.predictions(row, tmp_path)]
            assert said
            assert set(said) <= set(typing.get_args(Verdict))
