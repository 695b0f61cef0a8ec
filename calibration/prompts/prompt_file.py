"""Prompt files: JSON lines, or the rows of a parquet file, in our own form or in others.

    {"id": "a", "category": "code", "token_ids": [1, 2, 3]}
    {"id": "b", "category": "code", "text": "def f("}
    {"id": "c", "category": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    {"id": "d", "category": "faq", "cluster": "manual.md", "text": "Q: how do I"}

Token ids are used unchanged; a "text" beside them is for readers, and says the same. Text alone is
tokenized with the special tokens that the tokenizer adds by default. Messages, with the "tools"
beside them, go through the target's chat template, with the generation prompt. Prompts of the same
"cluster" are not independent samples. A column of a parquet file that is null in a row is absent.
"""

import codecs
import difflib
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.errors import LineProblem, PromptError, first_line, short
from ...recipes.installing import imported
from ...recipes.regular_file import open_stream
from ...recipes.strict_json import JsonProblem, parse_json, reading
from ..traces.manifest import MANIFEST_FILE, is_printable_name
from .prompt_forms import EVERY_PROMPT, ChosenPrompts, Message, PromptForm, of_column, read_form

EXAMPLE = '{"id": "1", "category": "chat", "text": "Hello"}'
FORM = f"one prompt per line: {EXAMPLE}"
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zX": ("xz", "unxz -k"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def mistaken_bytes(path: Path, start: bytes) -> tuple[str, str] | None:
    """What is wrong with a file that begins with these bytes, and the fix; None = nothing."""
    name = shlex.quote(str(path))
    for magic, (kind, unpack) in _PACKED.items():
        if start.startswith(magic):
            return f"it is compressed by {kind}", f"unpack it: {unpack} {name}"
    if start.startswith(_UTF16):
        convert = f"iconv -f UTF-16 -t UTF-8 {name} > NEW.jsonl"
        return "it is UTF-16, not UTF-8", f"convert it: {convert}"
    if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        write = f"jq -c '.[]' {name} > NEW.jsonl"
        return "it is one JSON list, not JSON lines", f"write one prompt per line: {write}"
    return None


def mistaken_lines(path: Path, first: str) -> str:
    """How to mend a file that has lines which are not prompts."""
    name = shlex.quote(str(path))
    if first.strip() == "{":
        return f"write each prompt on one line: jq -c . {name} > NEW.jsonl"
    if path.suffix in (".json", ".csv", ".txt", ".tsv"):
        return f"write JSON lines instead of {path.suffix}: {FORM}"
    return f"write {FORM}; 'draftquant record --help' names the other forms"


def missing_file(path: Path) -> str:
    """What to do about a file that cannot be read."""
    if (path / MANIFEST_FILE).is_file():
        return f"give a file with {FORM}; `record --continue` goes on behind texts of traces"
    beside = (
        path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() and not path.exists() else ()
    )
    close = difflib.get_close_matches(path.stem, sorted(file.stem for file in beside), n=1)
    near = path.parent / f"{close[0]}{path.suffix}" if close else None
    return f"did you mean {near}?" if near else f"give a file with {FORM}"


_ROWS = 256  # read at a time
MAX_GROUP_BYTES = 2**30
"""Limit of one row group unpacked. All of SPEED-Bench's longest prompts together have a tenth."""


def import_pyarrow(where: object) -> Any:
    """The package `pyarrow`, with its parquet and IPC readers."""
    what = "reading it needs pyarrow, which is not installed"
    names = ("pyarrow.ipc", "pyarrow.parquet", "pyarrow")
    return [imported(name, "parquet", where, what, PromptError) for name in names][-1]


def parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Every row of a parquet file with its number, from 1, without the columns that are null."""
    pyarrow = import_pyarrow(path)

    def wrong(what: str) -> PromptError:
        return PromptError(path, what, fix="give a parquet file with one prompt per row")

    number = 0
    try:
        with open_stream(path) as stream:
            file = pyarrow.parquet.ParquetFile(stream)
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            if any(group.total_byte_size > MAX_GROUP_BYTES for group in groups):
                raise wrong(f"it has a row group of more than {MAX_GROUP_BYTES:,} bytes")
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if value is not None}
    except (OSError, ValueError, pyarrow.ArrowException) as exc:
        raise wrong(f"cannot be read: {str(exc).splitlines()[0] if str(exc) else exc!r}") from exc


_LONGEST_LINE = 16 * 2**20  # bytes; a prompt of a million tokens has 7 MB
MOST_PROBLEMS = 20
Line = bytes | Mapping[str, Any]  # of a JSON lines file, or a row of a parquet file


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, at least one token.

    `later_turns` are the user's texts that follow it in the file. A text that continues another has
    `conversation_sha256`, as a `PromptTrace` has.
    """

    id: str
    category: str
    token_ids: tuple[int, ...]
    cluster: str | None = None  # shared with others: a document, task or user
    messages: tuple[Message, ...] = ()  # the source of `token_ids`, where later turns follow
    later_turns: tuple[str, ...] = ()
    conversation_sha256: str | None = None


def read_prompts(
    path: Path,
    *,
    target: Path | None = None,
    encoder: "PromptEncoder | None" = None,
    choice: ChosenPrompts = EVERY_PROMPT,
) -> tuple[Prompt, ...]:
    """Read a prompt file; "text" and "messages" need a target or an encoder."""
    encoder = encoder or PromptEncoder(target)
    prompts: dict[str, Prompt] = {}
    numbers: dict[str, int] = {}
    problems: dict[str, list[int]] = {}  # what is wrong -> the lines, of which it is
    fixes: list[str] = []
    first = ""
    lines: Iterator[tuple[int, Line]]
    lines = parquet_rows(path) if path.suffix == ".parquet" else _lines(path)
    for number, line in _chosen(lines, choice, path):
        first = first or (line.decode(errors="replace") if isinstance(line, bytes) else "row")
        try:
            row = of_column(_parsed(line), choice.prompts_column)
            prompt = prompt_of(row, number, encoder)
            if prompt.id in prompts:
                what = f"id {prompt.id!r} stands on line {numbers[prompt.id]} too"
                raise LineProblem(what, "give each prompt an id of its own")
            prompts[prompt.id], numbers[prompt.id] = prompt, number
        except LineProblem as exc:
            problems.setdefault(str(exc), []).append(number)
            fixes.append(exc.fix)
    if problems:
        named = [
            f"{path}:{lines[0]}: {what}" + (f" ({len(lines)} such lines)" if lines[1:] else "")
            for what, lines in problems.items()
        ]
        raise PromptError(
            path,
            f"{sum(map(len, problems.values()))} line(s) are not prompts:",
            details=named[:MOST_PROBLEMS],
            fix=next(filter(None, fixes), "") or mistaken_lines(path, first),
        )
    if not prompts:
        raise PromptError(path, "holds no prompt", fix=f"write {FORM}")
    return tuple(prompts.values())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number; in JSON, U+2028 does not end a line."""
    with reading(path, PromptError, missing_file(path)), open_stream(path) as stream:
        if mistake := mistaken_bytes(path, stream.peek(64)[:64]):
            raise PromptError(path, mistake[0], fix=mistake[1])
        number = 0
        while line := stream.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                what = f"line {number} has more than {_LONGEST_LINE:,} bytes"
                raise PromptError(path, what, fix="give one prompt per line")
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield number, line.removeprefix(codecs.BOM_UTF8)


class PromptEncoder:
    """The target's tokenizer, loaded at the first prompt that needs it; never remote code.

    Without a target only token ids can be read. `template_sha256` is of the chat template, once
    it has turned messages into token ids.
    """

    def __init__(self, target: Path | None, *, continues: bool = False) -> None:
        self.template_sha256: str | None = None
        self._target = target
        self._continues = continues
        self._tokenizer: Any = None

    def text(self, text: str) -> Sequence[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by default."""
        ids: Sequence[int] = self._loaded()(text)["input_ids"]
        return ids

    def messages(
        self,
        messages: Sequence[Message],
        *,
        key: str = "messages",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Sequence[int]:
        """Token ids of a conversation, up to the generation prompt or where an answer goes on."""
        if self._continues:
            _check_answer(messages[-1], key)
        tokenizer = self._loaded()
        if not tokenizer.chat_template:
            what = f"{key}: the target's tokenizer has no chat template"
            raise LineProblem(what, f"give the prompts as text: {EXAMPLE}")
        try:
            rendered = whole = self._rendered(messages, tools, continues=self._continues)
            if self._continues:
                whole = self._rendered(messages, tools, continues=False)
        except Exception as exc:  # from the target's own code
            what = f"{key}: the target's chat template fails: {first_line(exc)}"
            raise LineProblem(what, f"give the prompts as text: {EXAMPLE}") from exc
        if not whole.startswith(rendered):
            what = f"{key}: the target's chat template writes no answer so that it can go on"
            raise LineProblem(what, f"give the prompts as text: {EXAMPLE}")
        template = tokenizer.get_chat_template()
        self.template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        # The template writes the special tokens itself.
        ids: Sequence[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, continues: bool
    ) -> str:
        """What the template writes; where an answer continues, up to the end of that answer."""
        text: str = self._loaded().apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=not self._continues,
            continue_final_message=continues,
            tokenize=False,
        )
        return text

    def reads(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether these may be the ids of the text; True where no tokenizer tells."""
        try:
            tokenizer = self._loaded()
        except (LineProblem, PromptError):
            return True
        if max(token_ids) >= len(tokenizer):
            return True
        return any(
            tokenizer(text, add_special_tokens=special)["input_ids"] == token_ids
            or tokenizer.decode(token_ids, skip_special_tokens=special).split() == text.split()
            for special in (True, False)
        )

    def answer(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        text: str = self._loaded().decode(token_ids, skip_special_tokens=True)
        return text

    def _loaded(self) -> Any:
        if self._target is None:
            raise LineProblem("text and messages need the target's tokenizer; give token_ids")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._target, local_files_only=True, trust_remote_code=False
                )
            except Exception as exc:
                what = f"no tokenizer can be loaded: {first_line(exc)}"
                fix = "give prompts as token_ids"
                raise PromptError(self._target, what, fix=fix) from exc
        return self._tokenizer


def _check_answer(last: Message, key: str) -> None:
    """Refuse a conversation that ends with another role's turn, or with an empty answer."""
    if last["role"] != "assistant" or not str(last["content"]).strip():
        got = f"{short(last['role'])}, {short(last['content'])}"
        raise LineProblem(
            f"{key}: expected the beginning of an assistant's answer at the end, got {got}",
            "end the messages with the beginning of an answer, or leave --continue out",
        )


def _parsed(line: Line) -> Mapping[str, Any]:
    if not isinstance(line, bytes):
        return line
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as exc:
        what = f"not UTF-8: byte {hex(line[exc.start])}"
        raise LineProblem(what, "save the file as UTF-8 text") from exc
    except JsonProblem as exc:
        raise LineProblem(str(exc)) from exc
    if not isinstance(value, dict):
        raise LineProblem("expected a JSON object")
    return value


def _chosen(
    lines: Iterator[tuple[int, Line]], choice: ChosenPrompts, path: Path
) -> Iterator[tuple[int, Line]]:
    if choice.num_prompts is None:
        yield from lines
        return
    there = list(lines)
    yield from (there[place] for place in choice.taken(path, len(there)))


def prompt_of(value: Mapping[str, Any], number: int, encoder: PromptEncoder) -> Prompt:
    """The prompt of a line."""
    form = read_form(value)
    prompt_id = f"line-{number}" if form.id is None and form.of_others else form.id
    if prompt_id is None:
        raise LineProblem("id: it is missing", f"add an id, as in {EXAMPLE}")
    if not is_printable_name(prompt_id):
        raise LineProblem(f"id: expected 1 to 200 printable characters, got {short(prompt_id)}")
    what = "expected text of 1 to 200 printable characters"
    if not is_printable_name(form.category) or not form.category.strip():
        raise LineProblem(f"category: {what}, got {short(form.category)}")
    if form.cluster is not None and not is_printable_name(form.cluster):
        raise LineProblem(f"cluster: {what}, got {short(form.cluster)}")
    return Prompt(
        id=prompt_id,
        category=form.category,
        token_ids=_token_ids(form, encoder),
        cluster=form.cluster,
        messages=tuple(form.value) if form.later_turns else (),
        later_turns=form.later_turns,
    )


def _token_ids(form: PromptForm, encoder: PromptEncoder) -> tuple[int, ...]:
    ids: object = form.value
    if form.kind == "text":
        ids = encoder.text(form.value)
    elif form.kind == "messages":
        ids = encoder.messages(form.value, key=form.key, tools=form.tools)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise LineProblem("token_ids: expected a list of at least one whole number >= 0")
    if form.beside is not None and not encoder.reads(ids, form.beside):
        what = "token_ids: the target's tokenizer does not read them as the text beside them"
        raise LineProblem(what, "keep the one of both that is meant")
    return tuple(ids)
