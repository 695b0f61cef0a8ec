"""Prompt files: the three forms, and every problem with its line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt, PromptEncoder, read_prompts
from draftquant.recipes.errors import PromptError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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
        {"id": "ids", "category": "code", "token_ids": [5, 4], "text": "for readers"},
        "",
        {"id": "text", "text": "a b"},
        {"id": "chat", "messages": [{"role": "user", "content": "c"}]},
    )
    assert read_prompts(path, target=target) == (
        Prompt(id="ids", category="code", token_ids=(5, 4)),
        Prompt(id="text", category="all", token_ids=(0, 2, 3)),  # <s> as the tokenizer adds it
        Prompt(id="chat", category="all", token_ids=(0, 5, 4, 6)),  # <s> once, from the template
    )


TOOLS = [{"type": "function", "function": {"name": "d", "parameters": {}}}]


def call(arguments: Any) -> dict[str, Any]:
    """A message that calls a tool, as the API of OpenAI has it."""
    function = {"name": "d", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_tools_their_calls_and_their_answers_go_through_the_chat_template(
    tmp_path: Path, target: Path
) -> None:
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
    d = WORDS.index("d") if "d" in WORDS else WORDS.index("[unk]")
    assert tools == (d, *plain)
    assert called[: len(tools)] == tools
    assert [WORDS[i] for i in called[len(tools) :]][1:] == ["a", "[unk]", "b"]
    assert parsed == called


def test_a_cluster_is_read_from_every_form(tmp_path: Path, target: Path) -> None:
    path = write(
        tmp_path,
        {"id": "a", "cluster": "manual.md", "token_ids": [5, 4]},
        {"id": "b", "cluster": "user 7", "turns": ["c"]},
        {"id": "c", "cluster": None, "text": "a"},
    )
    found = read_prompts(path, target=target)
    assert [prompt.cluster for prompt in found] == ["manual.md", "user 7", None]


def test_the_template_that_was_used_is_known(tmp_path: Path, target: Path) -> None:
    encoder = PromptEncoder(target)
    read_prompts(write(tmp_path, {"id": "a", "text": "a"}), encoder=encoder)
    assert encoder.template_sha256 is None
    chat = write(tmp_path, {"id": "c", "messages": [{"role": "user", "content": "c"}]})
    read_prompts(chat, encoder=encoder)
    template = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8")).get(
        "chat_template"
    )
    text = template or (target / "chat_template.jinja").read_text(encoding="utf-8")
    assert encoder.template_sha256 == hashlib.sha256(text.encode()).hexdigest()


PROBLEMS: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ({"id": "x", "tokens": [1]}, "unknown key 'tokens'"),
    ({"token_ids": [1]}, "id: it is missing"),
    ({"id": "x", "token_ids": []}, "at least one whole number"),
    ({"id": "x", "token_ids": [1, True]}, "whole number"),
    ({"id": "x", "text": 1}, "text: expected text"),
    ({"id": "x", "text": "a", "messages": []}, "one of token_ids, text, messages"),
    ({"id": "x", "messages": [{"role": "user"}]}, "role and content"),
    ({"id": "x", "messages": [call("{")]}, "the arguments of 'd': not JSON"),
    ({"id": "x", "messages": [call([1])]}, r"an object or its JSON, got \[1\]"),
    ({"id": "x", "messages": [{"role": "a", "content": "", "tool_calls": 3}]}, "a function"),
    (
        {"id": "x", "messages": [call("{}"), {"role": "a", "content": [1]}]},
        r"messages\[1\]: expe",
    ),
    (
        {"id": "x", "conversations": [{"from": "gpt", "value": None, "tool_calls": [1]}]},
        "from and value, both of them text",
    ),
    ({"id": "x", "text": "a", "tools": TOOLS}, "tools: they are for messages"),
    ({"id": "x", "messages": [call("{}")], "tools": []}, "tools: expected a list of objects"),
    ({"id": "x", "text": "a"}, "need the target's tokenizer"),
    ({"id": "good", "token_ids": [1]}, "'good' stands on line 1 too"),
]


def test_each_problem_has_its_line(tmp_path: Path) -> None:
    odd = ["\x1b[31m", "a\nb", "", "\u202e", "a" * 201, 7]
    names = [({"id": "x", "token_ids": [1]} | {key: text}, f"{key}: expected")
             for text in odd for key in ("category", "cluster", "id")][:-1]  # fmt: skip
    for line, message in (*PROBLEMS, *names, (r'{"id": "a", "text": "\ud800"}', "half a char")):
        path = write(tmp_path, '{"id": "good", "token_ids": [1], "text": "x\u2028y"}', line)
        with pytest.raises(PromptError, match=message) as caught:
            read_prompts(path)
        assert f"{path}:2: " in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "{", {"id": "a", "token_ids": [1]}, "[]")
    with pytest.raises(PromptError, match="2 line") as caught:
        read_prompts(path)
    assert f"{path}:1: " in str(caught.value)
    assert f"{path}:3: " in str(caught.value)


def test_files_that_hold_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))


def test_a_target_without_tokenizer_or_template(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path, {"id": "a", "messages": [{"role": "user", "content": "c"}]})
    for template in target.glob("chat_template*"):
        template.unlink()
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(PromptError, match="no chat template"):
        read_prompts(path, target=target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match="no tokenizer can be loaded"):
        read_prompts(path, target=tmp_path / "empty")


def test_a_template_or_tokenizer_that_fails(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path, {"id": "a", "messages": [{"role": "user", "content": "c"}]})
    recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    fails = "{{ raise_exception('roles must alternate') }}"
    for template in (fails, "{{ messages + 1 }}", "{{ 5 | dictsort }}", recursive, "{{"):
        for file in target.glob("chat_template*"):
            file.write_text(template, encoding="utf-8")
        with pytest.raises(PromptError, match="the target's chat template fails: "):
            read_prompts(path, target=target)
    (target / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    with pytest.raises(PromptError, match="no tokenizer can be loaded"):
        read_prompts(path, target=target)
