"""The forms in which prompts come: ours, and those of the benchmarks and trainers that users have.

| form | keys | prompt |
|---|---|---|
| ours | `token_ids`, `text` or `messages` | unchanged; messages go through the chat template |
| MT-Bench, Spec-Bench, SPEED-Bench | `turns` | the first; others follow the target's answer |
| ShareGPT, SpecForge, TorchSpec | `conversations` | all up to the last turn of the user |
| instruction sets, mt_bench_prompts | `prompt` | one turn of the user; from a list the first |
| Alpaca | `instruction`, `input` | one turn of the user: both, with an empty line between |
| GSM8K and other tasks | `question` | one turn of the user |

Sources: `question.jsonl` of FastChat and Spec-Bench, the dataset cards of SPEED-Bench, Alpaca and
GSM8K, `scripts/prepare_data.py` of SpecForge.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...recipes.errors import LineProblem, PromptError, short
from ...recipes.listener import Heard
from ...recipes.strict_json import JsonProblem, parse_object

Kind = Literal["token_ids", "text", "messages"]
Message = Mapping[str, Any]

NO_CATEGORY = "all"
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How SPEED-Bench's texts begin that its script has not filled in yet."""
_IDS = ("id", "question_id", "prompt_id")
_BESIDE = {*_IDS, "category", "cluster"}
_SPEED = {"sub_category", "source", "src_id", "difficulty", "multiturn"}
"""Further keys of SPEED-Bench beside its turns."""
_OF_DATA_SETS = ("query", "input", "content", "problem", "user")
"""Keys of the user's turn in data sets of other forms."""
_OURS = _BESIDE | {"token_ids", "text", "messages", "tools"}


class PromptForm(NamedTuple):
    """What a line says about its prompt; lines without an id are numbered.

    `beside` is the text that stands beside token ids.
    """

    id: object
    category: object
    kind: Kind
    value: Any
    later_turns: tuple[str, ...] = ()
    cluster: object = None
    of_others: bool = False
    key: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    beside: str | None = None


def read_form(value: Mapping[str, Any]) -> PromptForm:
    """The prompt of one line, whichever tool wrote it."""
    marks = [mark for mark in _FORMS if mark in value]
    if len(marks) > 1 or (marks and value.keys() & {"token_ids", "text", "messages"}):
        raise LineProblem(f"expected one form of prompt, got {', '.join(sorted(value))}")
    allowed, read = _FORMS[marks[0]] if marks else (_OURS, _ours)
    unknown = sorted(value.keys() - allowed)
    foreign = [key for key in _OF_DATA_SETS if key in unknown]
    if unknown:
        raise LineProblem(
            f"unknown key {short((foreign or unknown)[0])}; known: {', '.join(sorted(allowed))};"
            f" forms: token_ids, text, messages, {', '.join(_FORMS)}",
            f"name the key that holds the prompt: --prompts-column {foreign[0]}" if foreign else "",
        )
    given_id = next((value[key] for key in _IDS if key in value), None)
    named = str(given_id) if type(given_id) is int else given_id
    kind, prompt, later_turns = read(value)
    category = value.get("category", NO_CATEGORY)
    cluster = value.get("cluster")
    key = marks[0] if marks else kind
    tools = () if marks else _tools(value, kind)
    beside = value.get("text") if kind == "token_ids" else None
    return PromptForm(
        named, category, kind, prompt, later_turns, cluster, bool(marks), key, tools, beside
    )


Read = tuple[Kind, Any, tuple[str, ...]]


def _ours(value: Mapping[str, Any]) -> Read:
    if value.keys() & {"token_ids", "text"} and "messages" not in value:
        if not isinstance(value.get("text", ""), str):
            raise LineProblem("text: expected text")
        kind: Kind = "token_ids" if "token_ids" in value else "text"
        return kind, value[kind], ()
    if "messages" in value and not value.keys() & {"text", "token_ids"}:
        return "messages", _messages(value["messages"], "messages", "role", "content"), ()
    forms = f"token_ids, text, messages, {', '.join(_FORMS)}"
    raise LineProblem(f"expected one of {forms}")


def _tools(value: Mapping[str, Any], kind: Kind) -> tuple[Mapping[str, Any], ...]:
    if "tools" not in value:
        return ()
    tools = value["tools"]
    if kind != "messages":
        raise LineProblem(f"tools: they are for messages, and the prompt is {kind}")
    good = isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools)
    if not good:
        raise LineProblem("tools: expected a list of objects, as the API of OpenAI has them")
    return tuple(tools)


def _prompt(value: Mapping[str, Any]) -> Read:
    prompt = value["prompt"]
    return _first_turn([prompt] if isinstance(prompt, str) else prompt, "prompt")


def _first_turn(turns: object, key: str) -> Read:
    good = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
    if not good:
        raise LineProblem(f"{key}: expected at least one text of the user")
    assert isinstance(turns, list)
    if any(turn.startswith(_PLACEHOLDER) for turn in turns):
        raise LineProblem(
            f"{key}: it holds a placeholder of SPEED-Bench, whose own script has to"
            " fetch the text first"
        )
    return "messages", [{"role": "user", "content": turns[0]}], tuple(turns[1:])


def _instruction(value: Mapping[str, Any]) -> Read:
    parts = [value["instruction"], value.get("input") or ""]
    if not all(isinstance(part, str) for part in parts) or not parts[0].strip():
        raise LineProblem("instruction: expected text, and text or nothing as input")
    return _first_turn(["\n\n".join(part for part in parts if part.strip())], "instruction")


def _conversations(value: Mapping[str, Any]) -> Read:
    given = value["conversations"]
    first = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else {}
    names = ("from", "value") if "from" in first else ("role", "content")
    messages = _messages(given, "conversations", *names)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise LineProblem("conversations: the user has no turn")
    return "messages", messages[: users[-1] + 1], ()


def _messages(given: object, key: str, role: str, content: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise LineProblem(f"{key}: expected a list of objects with {role} and {content}")
    for i, message in enumerate(given):
        if not _is_message(message, role, content):
            what = f"expected an object with {role} and {content}, both of them text"
            raise LineProblem(f"{key}[{i}]: {what}, got {short(message)}")
    if role == "role":
        return [
            _with_arguments(m, key)
            if _has_calls(m)
            else {name: value for name, value in m.items() if name != "tool_calls"}
            for m in given
        ]
    return [{"role": _ROLES.get(m[role], m[role]), "content": m[content]} for m in given]


def _is_message(message: object, role: str, content: str) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get(role), str):
        return False
    text = message.get(content)
    return isinstance(text, str) or (text is None and role == "role" and _has_calls(message))


def _has_calls(message: Mapping[str, Any]) -> bool:
    return message.get("tool_calls") not in (None, [])


def _with_arguments(message: Mapping[str, Any], key: str) -> Message:
    """Arguments of calls as objects, as templates expect; OpenAI's API has them as text.

    Source: vLLM's server does the same, `_postprocess_messages` of its chat_utils.
    """
    given = message["tool_calls"]
    called = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not isinstance(call, dict) or not isinstance(function, dict) or not named:
            what = f"{key}: tool_calls: expected a list of objects, each with a function"
            raise LineProblem(what)
        where = f"{key}: tool_calls: the arguments of {short(function['name'])}"
        arguments = function.get("arguments")
        try:
            read = parse_object(arguments or "{}") if isinstance(arguments, str) else arguments
        except JsonProblem as exc:
            raise LineProblem(f"{where}: {exc}") from exc
        if not isinstance(read, Mapping | None):
            raise LineProblem(f"{where}: expected an object or its JSON, got {short(read)}")
        called.append({**call, "function": {**function, "arguments": read or {}}})
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": called}


_FORMS: Mapping[str, tuple[set[str], Callable[[Mapping[str, Any]], Read]]] = {
    "turns": (
        _BESIDE | _SPEED | {"turns", "reference"},
        lambda value: _first_turn(value["turns"], "turns"),
    ),
    "conversations": (_BESIDE | {"conversations"}, _conversations),
    "prompt": (_BESIDE | {"prompt", "reference"}, _prompt),
    "instruction": (_BESIDE | {"instruction", "input", "output"}, _instruction),
    "question": (
        _BESIDE | {"question", "answer"},
        lambda value: _first_turn([value["question"]], "question"),
    ),
}
"""Key that marks a foreign form -> the keys that it may have, and its reader."""

CONVERSATIONS = ("messages", "conversations", "conversation")
KNOWN_COLUMNS = (
    ("token_ids",), *((name,) for name in CONVERSATIONS), ("turns",), ("prompt",),
    ("instruction", "input"), ("question",), ("text",),
)  # fmt: skip
"""Columns of a data set that make a prompt: the first ones that exist are used."""


@dataclass(frozen=True, kw_only=True)
class ChosenPrompts(Heard):
    """Which prompts of a file or a data set a run takes; None = all, or the one that is known."""

    prompts_split: str | None = None  # of a data set: [CONFIG/]SPLIT
    prompts_column: str | None = None
    num_prompts: int | None = None
    prompts_seed: int = 0

    def order(self, count: int) -> Sequence[int]:
        """Places 0 ... count - 1 in the order of the draw; in their own order for all.

        It depends only on seed and place, so a larger choice contains this one.
        """
        if self.num_prompts is None:
            return range(count)

        def drawn(place: int) -> bytes:
            return hashlib.sha256(f"{self.prompts_seed}/{place}".encode()).digest()

        return sorted(range(count), key=drawn)

    def taken(self, where: object, count: int) -> Sequence[int]:
        """The places taken from `count`, in their own order; there must be enough."""
        if self.num_prompts is not None and count < self.num_prompts:
            what = f"expected at least {self.num_prompts} prompts, got {count}"
            fix = f"take fewer: --num-prompts {count}" if count else "give another source"
            raise PromptError(where, what, fix=fix)
        return sorted(self.order(count)[: self.num_prompts])


EVERY_PROMPT = ChosenPrompts()


def of_column(row: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """A row as if the column were a known one: its text is a turn of the user."""
    if column is None:
        return row
    if column not in row:
        fix = f"--prompts-column takes one of these: {', '.join(sorted(row))}"
        raise LineProblem(f"no column {short(column)}", fix)
    cell = row[column]
    beside = {key: row[key] for key in ("id", "category", "cluster") if key in row}
    if isinstance(cell, str):
        return {**beside, "prompt": cell}
    if isinstance(cell, list) and cell and isinstance(cell[0], str):
        return {**beside, "turns": cell}
    if isinstance(cell, list):
        return {**beside, "conversations": cell}
    raise LineProblem(f"{column}: expected text, texts or messages, got {short(cell)}")
