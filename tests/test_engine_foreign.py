"""What `check` says of folders of other tools, beside what the engines did with them.

Of experiments/engines/FOREIGN.md one folder of each scheme of each tool, folders that were drawn by
a seed (foreign_mix.json), and kinds that are imitated by hand (kinds.json); headers only.
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

DRAWN = json.loads((ENGINES_FOLDER / "foreign_mix.json").read_text(encoding="utf-8"))
TWO_WIDTHS = {"qwen2-head-dim", "qwen2-odd-heads"}
"""Drafts that are none: the two engines read two widths of a head."""
KINDS = folder_rows.read_rows(ENGINES_FOLDER / "kinds.json")
SETS = {
    "made by tools": (folder_rows.read_rows(), 0),
    "drawn at random": (DRAWN["rows"], 53),
    "imitated by hand": ([row for row in KINDS if row["draft"] not in TWO_WIDTHS], 18),
}
"""Rows, and of how many answers `check` says that it does not know: of none that a tool made."""


@pytest.mark.parametrize("name", SETS)
def test_check_says_what_the_engines_did(name: str, tmp_path: Path) -> None:
    rows, unknown = SETS[name]
    counts, wrong = Counter[str](), list[str]()
    for asked, verdict, said in (a for row in rows for a in folder_rows.predictions(row, tmp_path)):
        if said.verdict in (verdict, "UNKNOWN"):
            counts["right" if said.verdict == verdict else "UNKNOWN"] += 1
        else:
            wrong.append(f"{asked}: {said.verdict} ({said.error}), not {verdict}")
    assert wrong == []
    assert counts["UNKNOWN"] <= unknown
    page = (ENGINES_FOLDER / "FOREIGN.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert row.endswith(f"| {counts['UNKNOWN']} | 0 |")


def test_the_sets_ask_both_engines_on_every_gpu() -> None:
    for rows, _ in SETS.values():
        told = [
            (verdict, asked.split()[0], asked.split()[1])
            for row in rows
            for verdict, questions in row["answers"].items()
            for asked in questions
        ]
        assert {verdict for verdict, *_ in told} == {"LOADS", "LOADS BUT WRONG", "REFUSED"}
        assert {engine for _, engine, _ in told} == {"vllm", "sglang"}
    gpus = ("sm80", "sm90", "sm100", "gfx942", "gfx950")
    asked = [
        each.split()[:2] for row in DRAWN["rows"] for q in row["answers"].values() for each in q
    ]
    assert set(map(tuple, asked)) == set(itertools.product(("vllm", "sglang"), gpus))


JUNK: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "x", [], {}, [None], {"a": 1}, [{}, {}])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_a_declaration_of_any_shape_is_answered_or_refused(tmp_path: Path) -> None:
    small = [row for row in SETS["made by tools"][0] if len(row["answers"]) == 1]
    for seed in range(10):
        random = Random(seed)
        row = copy.deepcopy(random.choice(small))
        for _ in range(5):
            declared = row["config"].get("quantization_config") or row["config"]
            container, key = random.choice(list(places(declared)))
            container[key] = copy.deepcopy(random.choice(JUNK))
            with suppress(DraftQuantError):
                said = [one.verdict for *_, one in folder_rows.predictions(row, tmp_path)]
                assert said
                assert set(said) <= set(typing.get_args(Verdict))


@pytest.mark.parametrize("method", ["gguf", "bitsandbytes", "gptq"])
def test_names_decide_nothing_under_a_method_that_is_not_read(method: str, tmp_path: Path) -> None:
    row = next(row for row in KINDS if row["draft"] == "lm-gptq")
    declared = {**row["config"]["quantization_config"], "quant_method": method, "sym": "maybe"}
    answers = {"UNKNOWN": [f"{engine} sm90 1" for engine in ("vllm", "sglang")]}
    row = {**row, "config": {**row["config"], "quantization_config": declared}, "answers": answers}
    for _, _, said in folder_rows.predictions(row, tmp_path):
        assert said.verdict == ("UNKNOWN" if method == "gptq" else "REFUSED")
        assert "no module or parameter" not in (said.error or "")
