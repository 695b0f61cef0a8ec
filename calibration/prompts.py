"""Prompt files: JSON lines, each one prompt, in one of three forms.

    {"id": "a", "category": "code", "token_ids": [1, 2, 3]}
    {"id": "b", "category": "code", "text": "def f("}
    {"id": "c", "category": "chat", "messages": [{"role": "user", "content": "Hi"}]}

Token ids are used as they are; a "text" beside them is for human readers only. Text alone is
tokenized with the special tokens that the target's tokenizer adds by default. Messages go through
its chat template, with the generation prompt. "category" may be absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipes.errors import short
from ..recipes.regular_file import open_stream
from ..recipes.strict_json import JsonProblem, parse_json
from .errors import PromptError
from .trace_manifest import is_printable_name

NO_CATEGORY = "all"
_LONGEST_LINE = 16 * 2**20  # bytes; a prompt of a million tokens has 7 MB
_MOST_PROBLEMS = 20
_KEYS = {"id", "category", "token_ids", "text", "messages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: `token_ids` is what the target is given, at least one token."""

    id: str
    category: str
    token_ids: tuple[int, ...]


def read_prompts(path: Path, *, target: Path | None = None) -> tuple[Prompt, ...]:
    """Read a prompt file.

    Args:
        path: JSON lines as described above; blank lines are skipped.
        target: folder of the target, whose tokenizer is used for "text" and "messages" (never
            remote code); not needed for "token_ids".

    Returns:
        The prompts in the order of the file, at least one.

    Raises:
        PromptError: the file cannot be read, or holds lines that are no prompts: the first twenty,
            each with its problem.
    """
    encoder = _Encoder(target)
    prompts: dict[str, Prompt] = {}
    problems: list[str] = []
    for number, line in _lines(path):
        try:
            prompt = _prompt(line, encoder)
            if prompt.id in prompts:
                raise _LineProblem(f"id {prompt.id!r} stands on an earlier line too")
            prompts[prompt.id] = prompt
        except _LineProblem as exc:
            problems.append(f"{path}:{number}: {exc}")
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        raise PromptError(path, f"{len(problems)} line(s) are no prompts:", details=problems,
                          fix="see draftquant/calibration/prompts.py for the form")  # fmt: skip
    if not prompts:
        raise PromptError(path, "holds no prompt", fix="add one JSON object per line")
    return tuple(prompts.values())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number; U+2028 is no line end in JSON."""
    try:
        with open_stream(path) as stream:
            number = 0
            while line := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    what = f"line {number} has more than {_LONGEST_LINE:,} bytes"
                    raise PromptError(path, what, fix="give one prompt per line")
                if line.strip():
                    yield number, line
    except OSError as exc:
        raise PromptError(path, f"cannot be read: {exc}", fix="give a JSON lines file") from exc


class _LineProblem(Exception):  # noqa: N818 - collected, never seen by a user as an exception
    """What is wrong with one line."""


class _Encoder:
    """The target's tokenizer, loaded at the first line that needs it."""

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self._tokenizer: Any = None

    def text(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._loaded()(text)["input_ids"]
        return ids

    def messages(self, messages: list[Mapping[str, Any]]) -> Sequence[int]:
        tokenizer = self._loaded()
        if not tokenizer.chat_template:
            raise _LineProblem("messages: the target's tokenizer has no chat template; give text")
        from jinja2 import TemplateError

        try:
            rendered = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
            raise _LineProblem(f"messages: the target's chat template fails: {exc}") from exc
        # The template writes the special tokens itself.
        ids: Sequence[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def _loaded(self) -> Any:
        if self._target is None:
            raise _LineProblem("text and messages need the target's tokenizer; give token_ids")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._target, local_files_only=True, trust_remote_code=False
                )
            except Exception as exc:
                first = (str(exc).strip() or repr(exc)).splitlines()[0]
                raise PromptError(self._target, f"no tokenizer can be loaded: {first}",
                                  fix="give prompts as token_ids") from exc  # fmt: skip
        return self._tokenizer


def _prompt(line: bytes, encoder: _Encoder) -> Prompt:
    try:
        value = parse_json(line.decode("utf-8"))
    except (UnicodeDecodeError, JsonProblem) as exc:
        raise _LineProblem(str(exc)) from exc
    if not isinstance(value, dict):
        raise _LineProblem("expected a JSON object")
    unknown = sorted(value.keys() - _KEYS)
    if unknown:
        raise _LineProblem(f"unknown key {short(unknown[0])}; known: {', '.join(sorted(_KEYS))}")
    prompt_id, category = value.get("id"), value.get("category", NO_CATEGORY)
    if not is_printable_name(prompt_id):
        raise _LineProblem(f"id: expected 1 to 200 printable characters, got {short(prompt_id)}")
    if not is_printable_name(category) or not category.strip():
        what = "expected text of 1 to 200 printable characters"
        raise _LineProblem(f"category: {what}, got {short(category)}")
    return Prompt(id=prompt_id, category=category, token_ids=_token_ids(value, encoder))


def _token_ids(value: Mapping[str, Any], encoder: _Encoder) -> tuple[int, ...]:
    if "token_ids" in value and "messages" not in value:
        ids: object = value["token_ids"]
    elif "text" in value and "messages" not in value:
        if not isinstance(value["text"], str):
            raise _LineProblem("text: expected a string")
        ids = encoder.text(value["text"])
    elif "messages" in value and not value.keys() & {"text", "token_ids"}:
        ids = encoder.messages(_messages(value["messages"]))
    else:
        raise _LineProblem("expected one of token_ids, text, messages")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise _LineProblem("token_ids: expected a list of at least one whole number >= 0")
    return tuple(ids)


def _messages(value: object) -> list[Mapping[str, Any]]:
    good = isinstance(value, list) and value and all(
        isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
        for m in value
    )  # fmt: skip
    if not good:
        raise _LineProblem("messages: expected a list of objects with role and content")
    return list(value)  # type: ignore[call-overload, no-any-return]
