"""Reasons of `check` begin with a sentence: what an engine's error means, its own text behind."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_pairs import check_draft
from draftquant.quantize import engines
from draftquant.quantize.engines.contract import EngineName, explained, is_raw, meaning, meanings
from draftquant.scripts.cli import main
from reasons import own_text
from tiny import tiny_eagle3_llama
from tiny_dspark import tiny_dspark

QUANTIZE = Path(engines.__file__).resolve().parents[1]
RECORDED = Path(__file__).parents[1] / "experiments" / "engines"


def filled(template: str) -> str:
    """What `format` would make of it."""
    return re.sub(r"\{[\w.\[\]]*(!r)?\}", lambda match: "'7'" if match[1] else "7", template)


def errors_in_the_tables() -> Iterator[str]:
    rows = tomllib.loads((QUANTIZE / "engines" / "schemes.toml").read_text(encoding="utf-8"))
    for refused in rows["refused"].values():
        yield from (filled(text) for _, text, *_ in refused.values() if is_raw(text))
    yield from (row["error"] for of_layout in rows["concatenated"].values() for row in of_layout)
    rules = tomllib.loads((QUANTIZE / "engines" / "rules.toml").read_text(encoding="utf-8"))
    texts = [filled(each["says"][1]) for rows in rules.values() for each in rows]
    for text in (*texts, *findings_of_the_modules()):
        if is_raw(text) and not text.startswith("ValidationError"):  # of any method
            yield text


def findings_of_the_modules() -> Iterator[str]:
    """The texts of findings where they are raised, with 7 for what they quote."""
    for module in (QUANTIZE / "engines").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name("Finding"), args=[_, ast.Constant(str(text)), _]):
                    yield text
                case ast.Call(func=ast.Name("Finding"), args=[_, ast.JoinedStr(parts), _]):
                    yield "".join(map(quoted, parts))


def quoted(part: ast.expr) -> str:
    match part:
        case ast.Constant(str(text)):
            return text
        case ast.FormattedValue(conversion=conversion):
            return "'7'" if conversion == ord("r") else "7"
    raise AssertionError(ast.dump(part))


def errors_that_were_recorded(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("error"), str):
            yield value["error"]
        if isinstance(value.get("errors"), dict):
            yield from value["errors"].values()
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from errors_that_were_recorded(each)


def test_every_error_in_the_tables_has_a_meaning() -> None:
    found = sorted(set(errors_in_the_tables()))
    assert len(found) > 50
    assert [text for text in found if meaning(text, engine="vLLM", gpu="B200") is None] == []


def test_every_error_that_was_recorded_has_a_meaning() -> None:
    files = sorted(RECORDED.glob("*.json"))
    told = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    found = sorted({text for one in told for text in errors_that_were_recorded(one)})
    assert len(found) > 120
    assert [t for t in found if is_raw(explained(t, engine="vLLM", gpu="B200"))] == []
    raw = [text for text in found if is_raw(text)]  # the others are parts of reasons
    assert [t for t in raw if meaning(t, engine="vLLM", gpu="B200") is None] == []


def test_no_row_is_hidden_by_one_before_it() -> None:
    """Each expression is looked for in the text of those behind it."""
    rows = [pattern for pattern, _ in meanings()]
    hidden = [
        (behind.pattern, first.pattern)
        for i, behind in enumerate(rows)
        for first in rows[:i]
        if first.search(re.sub(r"\\(.)", r"\1", behind.pattern))
    ]
    assert hidden == []


def test_what_stands_in_no_row_is_no_raw_error_either() -> None:
    said = explained("LookupError: gone", engine="SGLang", gpu="B200 (sm100)")
    assert said == "SGLang ends with an error of its own [LookupError: gone]"
    assert own_text(said) == "LookupError: gone"
    assert explained("fc is dropped", engine="SGLang", gpu="B200 (sm100)") == "fc is dropped"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("AttributeError: 'QKVParallelLinear' object has no attribute 'weight'",
         "vLLM computes with the weight of a QKVParallelLinear itself"),
        ("RuntimeError: start (0) + length (8) exceeds dimension size (4).",
         "vLLM looks for more rows or columns than a stored tensor has"),
        ("RuntimeError: start (3) + length (1) exceeds dimension size (3).",
         "vLLM fuses linears whose scales are in blocks of 128 rows"),
    ],
)  # fmt: skip
def test_an_error_means_what_ran_into_it(error: str, said: str) -> None:
    assert str(meaning(error, engine="vLLM", gpu="B200")).startswith(said)


def test_what_cannot_be_asked_is_not_sent_to_an_engine_that_can(tmp_path: Path) -> None:
    source = tiny_dspark(tmp_path / "draft", config={"model_type": "qwen2"})
    engines: tuple[EngineName, ...] = ("sglang", "tensorrt-llm")
    asked, other = (check_draft(source, engine=each, arch="sm90").remedy for each in engines)
    assert ("--ask" in str(asked), other) == (True, "try it")


def test_int4_on_amd_in_sglang(tmp_path: Path) -> None:
    source, out = str(tiny_eagle3_llama(tmp_path / "draft")), str(tmp_path / "out")
    assert main(["quantize", source, "--recipe", "int4-channel", "--out", out]) == 0
    assert main(["check", out, "--engine", "sglang", "--gpu", "MI300X"]) == 1


def test_the_command_for_sglang_says_what_unquant_does(tmp_path: Path) -> None:
    source = tiny_eagle3_llama(tmp_path / "draft", config={"eagle_config": {}})
    pair = Path(__file__).parent / "pairs" / "eagle3-llama" / "draft"
    for draft, engine in ((source, "vllm"), (source, "sglang"), (pair, "sglang")):
        assert main(["check", str(draft), "--engine", engine, "--gpu", "h100"]) in (0, 1)
