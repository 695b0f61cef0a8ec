"""What the gate prints: bounds, categories, the verdict, and text of files as text."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.recipes import load_recipe
from draftquant.scripts.verbs.gate import print_gate
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import Look
from draftquant.validate.runs.gate_run import _algorithm_to_try, _recipes_to_try
from handmade_replays import RELEASE, noisy, replay, spread


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of each line, without the lines of tables."""
    return [" ".join(re.split(r"[\s│┃]+", line)).strip() for line in
            capsys.readouterr().out.splitlines()]  # fmt: skip


def test_bounds_categories_verdict_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = spread(600, 69), noisy(0, 4, 30) + noisy(64, 4, 30) + noisy(0, 4, 9)
    background = Background(warnings=("[bold]no[/] provenance",))
    replays = (replay(each, categories="a" * 30 + "b" * 30 + "c" * 9) for each in rows)
    print_gate(judge(*replays, RELEASE, background=background))
    lines = printed(capsys)
    verdict = next(i for i, line in enumerate(lines) if line.startswith("FAIL: With 95%"))
    assert lines[verdict + 3] == "draftquant compare BF16 QUANT OUT1 OUT2 --traces OTHERS"
    assert lines[verdict + 4] == "warning: [bold]no[/] provenance"
    assert lines[verdict + 5].endswith("has fewer than 30 prompts and is not judged alone: c")


def test_commands_name_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """BF16, not the FP8 in a recipe's name; what nobody knows stays as it is."""
    report = judge(replay(spread(600)), replay(noisy(10, 60)), RELEASE)
    print_gate(report, {"BF16": "'a draft'", "QUANT": "int4", "TRACES": "t"})
    lines = printed(capsys)
    assert "draftquant gate 'a draft' int4 --traces FRESH" in lines
    record = "draftquant record --target TARGET --draft 'a draft' --tables --prompts PROMPTS"
    assert f"{record} --out FRESH" in lines


def test_short_prompts_and_a_look_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    short, look = [*spread(600), (0, 0)], Look(number=2, total=3, spending="pocock")
    print_gate(judge(replay(short), replay([*noisy(3, 4), (0, 0)]), RELEASE, look=look))
    lines = printed(capsys)
    assert lines[0] == "Gate, planned interim analysis 2 of 3"
    assert "Categories" not in lines
    assert any("97.68% 40 (+ 1 too short) 40.0" in line for line in lines)
    assert any(line.startswith("warning: this is planned interim analysis 2") for line in lines)


def test_recipes_that_may_lose_less(subtests: pytest.Subtests) -> None:
    rows: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("int4-channel", "gptq", ("int4-channel-gptq", "fp8-ptpc")),
        ("int4-channel-gptq", None, ("fp8-ptpc",)),
        ("mi325x-w4a8", "gptq", ("mi325x-w4a8-gptq", "mi325x-fp8")),
        ("blackwell-nvfp4", "gptq", ("blackwell-nvfp4-learned", "blackwell-fp8-mla")),
        ("fp8-ptpc", None, ()),
    ]  # fmt: skip
    for recipe, algorithm, others in rows:
        with subtests.test(str((recipe, algorithm, others))):
            made_by: Any = SimpleNamespace(recipe=load_recipe(recipe))
            assert (_algorithm_to_try(made_by), _recipes_to_try(made_by)) == (algorithm, others)
            assert (_algorithm_to_try(None), _recipes_to_try(None)) == (None, ())
