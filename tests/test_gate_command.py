"""What the gate prints: bounds, categories, the look, the verdict, and warnings that are text."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.recipes import load_recipe
from draftquant.scripts.api.gate_on_traces import algorithm_to_try, other_policy_warnings
from draftquant.scripts.commands.gate_report import print_gate
from draftquant.validate.judging.anomalies import Background
from draftquant.validate.judging.interim_analysis import Look
from draftquant.validate.judging.judgement import judge
from draftquant.validate.judging.policy import resolve_policy
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
    assert "policy limit change lower bound upper bound confidence prompts effective" in lines
    assert any(line.startswith("release -1.00% -1.7") for line in lines)
    assert any(line.endswith("95.00% 69 69.0") for line in lines)
    at = lines.index("Categories")
    rows = [line.split() for line in lines[at:] if line[:2] in ("a ", "b ", "1 ")]
    assert [row[:3] + row[-1:] for row in rows] == [
        ["a", "30", "-3.00%", "PASS"],
        ["b", "30", "-3.00%", "FAIL"],
        ["1", "small", "one", "small"],
    ]
    verdict = next(i for i, line in enumerate(lines) if line.startswith("FAIL: The mean"))
    assert lines[verdict].endswith("Of the categories these lost too much too: 'b'.")
    assert lines[verdict + 1] == "- Use a wider format."
    assert lines[verdict + 3] == "warning: [bold]no[/] provenance"
    assert lines[verdict + 4] == (
        "warning: 1 of the 3 categories, with fewer than 30 prompts each (9 together), were not"
        " judged by themselves"
    )


def test_categories_that_were_not_judged_are_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "abcdefgh"
    print_gate(judge(replay(spread(600), categories=names), replay(noisy(3, 4), categories=names),
                     RELEASE))  # fmt: skip
    lines = printed(capsys)
    assert "Categories" not in lines
    assert (
        "warning: none of the 8 categories was judged by itself: each has fewer than 30 prompts"
    ) in lines


def test_one_category_is_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    look = Look(number=2, total=3, spending="pocock")
    print_gate(judge(replay(spread(600)), replay(noisy(3, 4)), RELEASE, look=look))
    lines = printed(capsys)
    assert lines[0] == "Gate, look 2 of 3"
    assert "Categories" not in lines
    assert any("97.68% 40 40.0" in line for line in lines)
    assert any(line.startswith("warning: look 2 of 3 (pocock)") for line in lines)


def test_without_a_comparison_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    other = replay(spread(600), traces=dataclasses.replace(FIGURES, sha256="1" * 64))
    print_gate(judge(replay(spread(600)), other, resolve_policy("release")))
    assert printed(capsys)[1].startswith("ANOMALOUS: The two drafts were replayed on different")


def test_no_provenance_asks_for_no_policy() -> None:
    assert other_policy_warnings(None, "release") == ()


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
    assert algorithm_to_try(made_by) == algorithm
    assert algorithm_to_try(None) is None
