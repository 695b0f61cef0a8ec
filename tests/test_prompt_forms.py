"""Prompts in the forms of benchmarks and trainers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.prompts.prompt_forms import read_form
from draftquant.recipes.errors import LineProblem

USER = {"role": "user", "content": "Hi"}
PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"


@pytest.mark.parametrize(
    ("line", "prompt_id", "category", "messages", "num_later_turns"),
    [
        # FastChat's question.jsonl
        (
            {"question_id": 81, "category": "writing", "turns": ["Hi", "again"], "reference": []},
            "81", "writing", [USER], 1,
        ),
        # SPEED-Bench
        (
            {"question_id": "a1", "category": "code", "sub_category": "c++", "turns": ["Hi"]},
            "a1", "code", [USER], 0,
        ),
        # ShareGPT: what the user asks last, behind all that was said before
        (
            {"id": "x_0", "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Bye"},
            ]},
            "x_0", "all",
            [{"role": "system", "content": "Be brief."}, USER,
             {"role": "assistant", "content": "Hello"}, USER], 0,
        ),
        # SpecForge, TorchSpec
        (
            {"id": 7, "conversations": [USER, {"role": "assistant", "content": "Hello"}]},
            "7", "all", [USER], 0,
        ),
        # instruction sets; mt_bench_prompts
        ({"prompt": "Hi"}, None, "all", [USER], 0),
        # Alpaca; GSM8K
        ({"instruction": "Hi", "input": "", "output": "Hello"}, None, "all", [USER], 0),
        (
            {"instruction": "Add.", "input": "1 2"}, None, "all",
            [{"role": "user", "content": "Add.\n\n1 2"}], 0,
        ),
        ({"question": "Hi", "answer": "#### 3"}, None, "all", [USER], 0),
        (
            {"prompt": ["Hi", "again", "more"], "prompt_id": 5, "category": "math"},
            "5", "math", [USER], 2,
        ),
    ],
)  # fmt: skip
def test_forms_of_others(
    line: dict[str, Any], prompt_id: str | None, category: str, messages: Any, num_later_turns: int
) -> None:
    form = read_form(line)
    assert (form.id, form.category) == (prompt_id, category)
    assert (form.kind, form.value) == ("messages", messages)
    assert len(form.later_turns) == num_later_turns
    assert form.of_others


def test_what_is_no_form() -> None:
    for line, message in (
        ({"turns": ["a", 1]}, "turns: expected at least one text of the user"),
        ({"turns": "a"}, "turns: expected at least one text of the user"),
        ({"prompt": {}}, "prompt: expected at least one text of the user"),
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM X"]}, "whose own script"),
        ({"turns": ["a"], "prompt": "a"}, "expected one form of prompt, got prompt, turns"),
        ({"turns": ["a"], "token_ids": [1]}, "expected one form of prompt"),
        ({"conversations": []}, "objects with role and content"),
        ({"conversations": [{"from": "human"}]}, "an object with from and value"),
        ({"conversations": [{"role": "assistant", "content": "a"}]}, "the user has no turn"),
        ({"query": "a"}, "forms: token_ids, text, messages, turns, conversations, prompt, instr"),
        ({"question": 3}, "question: expected at least one text of the user"),
        ({"instruction": "a", "input": 3}, "instruction: expected text, and text or nothing"),
        ({"id": "a"}, "expected one of token_ids, text, messages, turns, conversations, prompt"),
    ):
        with pytest.raises(LineProblem, match=message):
            read_form(line)


def chat_target(folder: Path) -> Path:
    """The pair's target, with a chat template."""
    shutil.copytree(PAIR / "target", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}", encoding="utf-8"
    )
    return folder


def test_lines_without_an_id_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os"}\n\n{"prompt": "import re"}\n', encoding="utf-8")
    prompts = read_prompts(path, target=chat_target(tmp_path / "target"))
    assert [prompt.id for prompt in prompts] == ["line-1", "line-3"]
    assert prompts[0].token_ids != prompts[1].token_ids
