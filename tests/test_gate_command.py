"""What the gate prints: bounds, categories, the look, the verdict, and warnings that are text."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.recipes import load_recipe
from draftquant.scripts.verbs.gate import print_gate
from draftquant.validate.judging.advice import Background
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import Look, resolve_policy
from draftquant.validate.runs.gate_run import _algorithm_to_try, _policy_warnings, _recipes_to_try
from handmade_replays import FIGURES, RELEASE, noisy, replay, spread


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of each line, without the lines of tables."""
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in lines]


def test_bounds_categories_verdict_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    categories = "a" * 30 + "b" * 30 + "c" * 9
    replays = [
        replay(histograms, categories=categories)
        for histograms in (spread(600, 69), noisy(0, 4, 30) + noisy(64, 4, 30) + noisy(0, 4, 9))
    ]
    background = Background(warnings=("[bold]no[/] provenance",))
    print_gate(judge(*replays, RELEASE, background=background))
    lines = printed(capsys)
    assert lines[0] == "Gate"
    assert (
        "policy limit change lower bound upper bound confidence prompts effective sample size"
        in lines
    )
    assert any(line.startswith("release -1.00% -1.7") for line in lines)
    assert any(line.endswith("95.00% 69 69.0") for line in lines)
    at = lines.index("Categories")
    rows = [line.split() for line in lines[at:] if line[:2] in ("a ", "b ", "c ")]
    assert [row[:3] + row[-1:] for row in rows] == [
        ["a", "30", "-3.00%", "PASS"],
        ["b", "30", "-3.00%", "FAIL"],
    ]
    verdict = next(i for i, line in enumerate(lines) if line.startswith("FAIL: With 95%"))
    assert lines[verdict].endswith("Categories beyond their own limit: 'b'.")
    assert lines[verdict + 1] == "- Use a wider format."
    assert lines[verdict + 2].startswith("- Compare drafts by the recipes that 'draftquant recipes")
    assert lines[verdict + 3] == "draftquant compare BF16 QUANT OUT1 OUT2 --traces OTHERS"
    assert lines[verdict + 4] == "warning: [bold]no[/] provenance"
    assert lines[verdict + 5] == (
        "warning: 1 category has fewer than 30 prompts and is not judged alone: c"
    )


def test_commands_name_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """BF16, not the FP8 in a recipe's name; what nobody knows stays as it is."""
    report = judge(replay(spread(600)), replay(noisy(10, 60)), RELEASE)
    print_gate(report, {"BF16": "'a draft'", "QUANT": "int4", "TRACES": "t"})
    lines = printed(capsys)
    assert "draftquant gate 'a draft' int4 --traces FRESH" in lines
    record = "draftquant record --target TARGET --draft 'a draft' --tables --prompts PROMPTS"
    assert f"{record} --out FRESH" in lines


def test_a_prompt_that_is_too_short_stands_beside_their_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = [*spread(600), (0, 0)]
    print_gate(judge(replay(short), replay([*noisy(3, 4), (0, 0)]), RELEASE))
    assert any(" 40 (+ 1 too short) 40.0" in line for line in printed(capsys))


def test_categories_that_were_not_judged_are_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "abcdefgh"
    print_gate(judge(replay(spread(600), categories=names), replay(noisy(3, 4), categories=names),
                     RELEASE))  # fmt: skip
    lines = printed(capsys)
    assert "Categories" not in lines
    assert (
        "warning: 8 categories have fewer than 30 prompts and are not judged alone:"
        " a, b, c, d, e, f, g, h"
    ) in lines


def test_one_category_is_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    look = Look(number=2, total=3, spending="pocock")
    print_gate(judge(replay(spread(600)), replay(noisy(3, 4)), RELEASE, look=look))
    lines = printed(capsys)
    assert lines[0] == "Gate, planned interim analysis 2 of 3"
    assert "Categories" not in lines
    assert any("97.68% 40 40.0" in line for line in lines)
    assert any(
        line.startswith("warning: this is planned interim analysis 2 of 3 (pocock)")
        for line in lines
    )


def test_without_a_comparison_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    other = replay(spread(600), traces=dataclasses.replace(FIGURES, sha256="1" * 64))
    print_gate(judge(replay(spread(600)), other, resolve_policy("release")))
    assert printed(capsys)[1].startswith("ANOMALOUS: The two drafts were replayed on different")


def test_no_provenance_asks_for_no_policy() -> None:
    assert _policy_warnings(None, "release") == ()


@pytest.mark.parametrize(
    ("recipe", "algorithm"),
    [
        ("int4-channel", "gptq"),
        ("mi355-mxfp4", "gptq"),
        ("int4-channel-gptq", None),
        ("fp8-ptpc", None),
    ],
)
def test_four_bits_that_were_rounded_plainly_can_be_rounded_better(
    recipe: str, algorithm: str | None
) -> None:
    made_by: Any = SimpleNamespace(recipe=load_recipe(recipe))
    assert _algorithm_to_try(made_by) == algorithm
    assert _algorithm_to_try(None) is None


@pytest.mark.parametrize(
    ("recipe", "others"),
    [
        ("int4-channel", ("int4-channel-gptq", "fp8-ptpc")),
        ("int4-channel-gptq", ("fp8-ptpc",)),
        ("mi325x-w4a8", ("mi325x-w4a8-gptq", "mi325x-fp8")),
        ("mi355-mxfp4", ("mi355-mxfp4-learned", "mi325x-fp8")),
        ("blackwell-nvfp4", ("blackwell-nvfp4-learned", "blackwell-fp8-mla")),
        ("fp8-ptpc", ()),
    ],
)
def test_recipes_that_may_lose_less(recipe: str, others: tuple[str, ...]) -> None:
    made_by: Any = SimpleNamespace(recipe=load_recipe(recipe))
    assert _recipes_to_try(made_by) == others
    assert _recipes_to_try(None) == ()
