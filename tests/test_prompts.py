"""Prompt files: the three forms, and every problem with its line."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt, PromptEncoder, read_prompts
from draftquant.calibration.prompts.prompt_forms import read_form
from draftquant.recipes.errors import LineProblem, PromptError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
WORDS = ["<s>", "[unk]", "a", "b", "c", "user", "assistant"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with a word tokenizer that puts <s> first, and a chat template."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    wrapped.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}"
    )
    wrapped.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_the_three_forms(tmp_path: Path, target: Path) -> None:
    path = write(
        tmp_path,
        {"id": "ids", "category": "code", "token_ids": [4, 5], "text": " c user"},
        "",
        {"id": "text", "text": "a b", "cluster": "manual.md"},
        {"id": "chat", "messages": [{"role": "user", "content": "c"}]},
    )
    assert read_prompts(path, target=target) == (
        Prompt(id="ids", category="code", token_ids=(4, 5)),
        # <s> as the tokenizer adds it
        Prompt(id="text", category="all", token_ids=(0, 2, 3), cluster="manual.md"),
        Prompt(id="chat", category="all", token_ids=(0, 5, 4, 6)),  # <s> once, from the template
    )


TOOLS = [{"type": "function", "function": {"name": "d", "parameters": {}}}]


def call(arguments: Any) -> dict[str, Any]:
    """A message that calls a tool, as the API of OpenAI has it."""
    function = {"name": "d", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_tools_calls_and_answers_go_through_the_template(tmp_path: Path, target: Path) -> None:
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = (
        "{% for t in tools or [] %} {{ t.function.name }}{% endfor %}"
        "{% for m in messages %} {{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "chat_template.jinja").unlink(missing_ok=True)
    asked = [{"role": "user", "content": "c"}]
    told = [*asked, call('{"x": "a"}'), {"role": "tool", "content": "b"}]
    path = write(
        tmp_path,
        {"id": "plain", "messages": asked},
        {"id": "tools", "messages": asked, "tools": TOOLS},
        {"id": "called", "messages": told, "tools": TOOLS},
        {"id": "object", "messages": [*asked, call({"x": "a"}), told[2]], "tools": TOOLS},
    )
    plain, tools, called, parsed = (one.token_ids for one in read_prompts(path, target=target))
    assert tools == (WORDS.index("[unk]"), *plain)  # which d is
    assert called[: len(tools)] == tools
    assert [WORDS[i] for i in called[len(tools) :]][1:] == ["a", "[unk]", "b"]
    assert parsed == called


PROBLEMS: tuple[Any, ...] = (
    "{", {"id": "x", "tokens": [1]}, {"token_ids": [1]}, {"id": "x", "token_ids": []},
    {"id": "x", "token_ids": [1, True]}, {"id": "x", "text": 1},
    {"id": "x", "text": 1, "token_ids": [1]}, {"id": "x", "text": "a", "messages": []},
    {"id": "x", "messages": [{"role": "user"}]}, {"id": "x", "messages": [call("{")]},
    {"id": "x", "messages": [call([1])]},
    {"id": "x", "messages": [{"role": "a", "content": "", "tool_calls": 3}]},
    {"id": "x", "messages": [call("{}"), {"role": "a", "content": [1]}]},
    {"id": "x", "conversations": [{"from": "gpt", "value": None, "tool_calls": [1]}]},
    {"id": "x", "text": "a", "tools": TOOLS}, {"id": "x", "messages": [call("{}")], "tools": []},
    {"id": "x", "text": "a"}, {"id": "good", "token_ids": [1]}, r'{"id": "a", "text": "\ud800"}',
)  # fmt: skip
"""Each on the second line; what is said of it is kept in told/prompts.txt."""


@pytest.mark.parametrize(("token_ids", "text", "agree"), [
    ([0, 2, 3], "a b", True),  # as the tokenizer writes them
    ([2, 3], "a  b", True),  # cut from a longer text
    ([2, 0, 3], "a <s> b", True),
    ([2, 0, 3], "a b", True),
    ([0, 2, 1], "a x", True),  # what no id says can only be tokenized
    ([2, 1], "a x", True),
    ([2, 3], "a c", False),
    ([2, 3], "a", False),
    ([2, 3, 4], "a b", False),
    ([2, 7], "a c", True),  # an id that this tokenizer has not; the target's size decides
])  # fmt: skip
def test_token_ids_are_those_of_the_text_beside_them(
    tmp_path: Path, target: Path, token_ids: list[int], text: str, agree: bool
) -> None:
    path = write(tmp_path, *({"id": n, "token_ids": token_ids, "text": text} for n in "xy"))
    shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    for encoder in (PromptEncoder(None), PromptEncoder(tmp_path / "bare"), PromptEncoder(target)):
        if agree or encoder._target != target:
            assert read_prompts(path, encoder=encoder)[0].token_ids == tuple(token_ids)
            continue
        with pytest.raises(PromptError, match=r"2 line(?s:.*)as the text beside them \(2 such"):
            read_prompts(path, encoder=encoder)


def test_each_problem_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(PromptError, match="2 line") as both:
        read_prompts(write(tmp_path, "{", {"id": "a", "token_ids": [1]}, "[]"))
    assert f"{tmp_path / 'prompts.jsonl'}:3: " in str(both.value)
    with pytest.raises(PromptError, match=r"(?s)25 line.*jsonl:1: .*24 such.*jsonl:25: ") as many:
        read_prompts(write(tmp_path, *[{"txt": "a"}] * 24, "[]"))
    assert len(many.value.details) == 2
    odd = ["\x1b[31m", "a\nb", "", "\u202e", "a" * 201, 7]
    names = [{"id": "x", "token_ids": [1]} | {key: text}
             for text in odd for key in ("category", "cluster", "id")][:-1]  # fmt: skip
    for line in (*PROBLEMS, *names):
        path = write(tmp_path, '{"id": "good", "token_ids": [1], "text": "x\u2028y"}', line)
        with pytest.raises(PromptError) as caught:
            read_prompts(path)
        assert f"{path}:2: " in str(caught.value)


def test_a_template_or_tokenizer_that_fails(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path, {"id": "a", "messages": [{"role": "user", "content": "c"}]})
    recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    fails = "{{ raise_exception('roles must alternate') }}"
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = config.get("chat_template") or next(target.glob("chat_template*")).read_text("utf-8")
    encoder = PromptEncoder(target)
    read_prompts(path, encoder=encoder)
    assert encoder.template_sha256 == hashlib.sha256(template.encode()).hexdigest()
    for template in (fails, "{{ messages + 1 }}", "{{ 5 | dictsort }}", recursive, "{{"):
        for file in target.glob("chat_template*"):
            file.write_text(template, encoding="utf-8")
        with pytest.raises(PromptError, match="the target's chat template fails: "):
            read_prompts(path, target=target)
    (target / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    with pytest.raises(PromptError, match="no tokenizer can be loaded"):
        read_prompts(path, target=target)


# ---- forms of benchmarks and trainers

USER = {"role": "user", "content": "Hi"}
SYSTEM, ANSWER = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}
TALK = [{"from": "system", "value": "S"}, *[{"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "A"}] * 2]  # fmt: skip
FORMS: tuple[tuple[dict[str, Any], tuple[str | None, str, Any, int]], ...] = (
    # FastChat's question.jsonl
    ({"question_id": 81, "category": "w", "turns": ["Hi", "again"], "reference": []},
     ("81", "w", [USER], 1)),
    # ShareGPT: what the user asks last, behind all that was said before
    ({"id": "x_0", "conversations": TALK}, ("x_0", "all", [SYSTEM, USER, ANSWER, USER], 0)),
    # SpecForge, TorchSpec
    ({"id": 7, "conversations": [USER, ANSWER]}, ("7", "all", [USER], 0)),
    # instruction sets; mt_bench_prompts; Alpaca; GSM8K
    ({"prompt": "Hi"}, (None, "all", [USER], 0)),
    ({"prompt": ["Hi", "b", "c"], "prompt_id": 5, "category": "m"}, ("5", "m", [USER], 2)),
    ({"instruction": "Hi", "input": "", "output": "A"}, (None, "all", [USER], 0)),
    ({"instruction": "H", "input": "1"}, (None, "all", [USER | {"content": "H\n\n1"}], 0)),
    ({"question": "Hi", "answer": "#### 3"}, (None, "all", [USER], 0)),
)  # fmt: skip


def test_forms_of_others(tmp_path: Path) -> None:
    for line, expected in FORMS:
        form = read_form(line)
        assert (form.id, form.category, form.value, len(form.later_turns)) == expected
        assert (form.kind, form.of_others) == ("messages", True)
    path = write(tmp_path, {"prompt": "import os"}, "", {"prompt": "import re"})
    found = read_prompts(path, target=chat_target(tmp_path / "chat"))
    assert [prompt.id for prompt in found] == ["line-1", "line-3"]
    assert found[0].token_ids != found[1].token_ids


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
