"""Chat prompts of four kinds, from text that an environment of Python holds: no network.

Questions, functions and passages come from docstrings and sources of the standard library and of
installed packages. Whole files belong to one part by a hash of their name.
"""

import ast
import hashlib
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

Part = Literal["training", "calibration", "choice", "gate"]
KINDS = ("question", "code", "text", "dialogue")
COUNTS: dict[Part, int] = {"training": 16_000, "calibration": 512, "choice": 400, "gate": 800}
"""Prompts of a part, of all kinds together."""
MAX_TOKENS = 256
"""Of a prompt with its template."""
_PERCENT: dict[Part, int] = {"gate": 10, "choice": 5, "calibration": 5, "training": 80}
_PER_FILE: dict[Part, int] = {"training": 10, "calibration": 2, "choice": 2, "gate": 2}
"""Prompts of one kind from one file: those that are judged come from many files."""
SHIPPED: dict[Part, int] = {"gate": 96, "calibration": 64}
"""Prompts that ship, from the standard library alone, whose licence is known."""
_PER_SHIPPED_FILE = 4
_EXCLUDED = frozenset({"tests", "test", "testing", "_vendor", "vendored", "idle_test", "encodings"})
_PROSE = re.compile(r"[A-Z][^>|={}_\\\[\]]*[.]", re.DOTALL)
_VERB = re.compile(
    "add|apply|build|calculate|check|combine|compute|convert|copy|count|create|"
    "decode|delete|describe|detect|determine|display|divide|draw|encode|"
    "evaluate|execute|extract|fetch|fill|filter|find|format|generate|get|group|"
    "import|initialize|insert|iterate|join|list|load|make|map|merge|move|"
    "normalize|open|parse|plot|print|process|read|reduce|register|remove|"
    "rename|render|replace|reset|resolve|return|run|save|search|select|send|"
    "set|show|sort|split|start|stop|store|test|transform|update|validate|"
    "verify|wait|wrap|write"
)
_QUESTIONS = (
    "How do I {task} in Python?",
    "What is the best way to {task}?",
    "I want to {task}. What should I know before I start?",
    "Can you show me how to {task}?",
    "Why would somebody need to {task}?",
)
_CODE = (
    "Explain what this function does:\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "What could go wrong in this code?\n\n```python\n{code}\n```",
    "Rewrite this function so that it is easier to read:\n\n```python\n{code}\n```",
)
_TEXT = (
    "Summarize this text in two sentences:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Explain this to a beginner:\n\n{text}",
    "Write three questions that this text answers:\n\n{text}",
)
FURTHER = (
    "Can you give me a short example?",
    "Explain that again in simpler words.",
    "Summarize your answer in one sentence.",
    "What are the advantages and disadvantages of this?",
)


def write_prompts(tokenizer: PreTrainedTokenizerFast, folder: Path, *, ships: bool = False) -> None:
    """A file for each part, as many prompts of each kind as there are; no prompt occurs twice.

    A line has the user's `turns`: two of a dialogue, else one.

    Args:
        ships: write those that ship.
    """
    counts = SHIPPED if ships else COUNTS
    found: dict[Part, dict[str, list[dict[str, Any]]]] = {p: {k: [] for k in KINDS} for p in counts}
    seen: set[str] = set()
    for name, source in _files(("stdlib",) if ships else ("stdlib", "purelib")):
        part = part_of(name)
        if part not in counts:
            continue
        most = _PER_SHIPPED_FILE if ships else _PER_FILE[part]
        own, wanted = found[part], counts[part] // len(KINDS)
        if all(len(prompts) >= wanted for prompts in own.values()):
            continue
        for kind, texts in _texts(source).items():
            taken = 0
            for text in texts:
                if len(own[kind]) == wanted or taken == most:
                    break
                if text in seen or len(asked(tokenizer, text)) > MAX_TOKENS:
                    continue
                seen.add(text)
                taken += 1
                named = f"{kind} {len(own[kind])} of {name}"
                turns = [text, _of(FURTHER, text)] if kind == "dialogue" else [text]
                own[kind].append({"id": named, "category": kind, "turns": turns})
    for part, by_kind in found.items():
        print(part, {kind: len(lines) for kind, lines in by_kind.items()}, flush=True)
        lines = [json.dumps(one) for same in zip(*by_kind.values(), strict=False) for one in same]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def asked(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a first turn in the target's template, up to where its answer begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return ids


def part_of(name: str) -> Part:
    """The part that a file belongs to, by its name alone."""
    place = int(_digest(name)[:8], 16) % 100
    for part, percent in _PERCENT.items():
        place -= percent
        if place < 0:
            return part
    raise AssertionError("percents add up to 100")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _of(choices: Sequence[str], text: str) -> str:
    return choices[int(_digest(text)[:8], 16) % len(choices)]


def _files(places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Sources in an order that depends on their names alone."""
    paths = {
        f"{key}/{path.relative_to(root).as_posix()}": path
        for key, root in {key: Path(sysconfig.get_paths()[key]) for key in places}.items()
        for path in root.rglob("*.py")
        if _EXCLUDED.isdisjoint(path.parts) and "site-packages" not in path.relative_to(root).parts
    }
    for name in sorted(paths, key=_digest):
        if 1_000 < paths[name].stat().st_size < 300_000:
            yield name, paths[name].read_text("utf-8", errors="replace")


def _texts(source: str) -> dict[str, list[str]]:
    """What the user asks about one file, by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the escapes in other people's strings
        try:
            module = ast.parse(source)
        except (SyntaxError, ValueError):  # a template
            return found
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        paragraphs = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")
        if task := _task(paragraphs[0]):
            kind = _of(("question", "question", "dialogue"), task)
            found[kind].append(_of(_QUESTIONS, task).format(task=task))
        if isinstance(node, ast.FunctionDef) and 4 <= len(node.body) <= 20:
            code = _without_docstring(node)
            found[_of(("code", "code", "code", "dialogue"), code)].append(
                _of(_CODE, code).format(code=code)
            )
        for paragraph in paragraphs:
            if 150 < len(paragraph) < 900 and _PROSE.fullmatch(paragraph):
                text = " ".join(paragraph.split())
                found["text"].append(_of(_TEXT, text).format(text=text))
    return found


def _task(summary: str) -> str | None:
    """ "Return the roots of a polynomial." -> "return the roots of a polynomial"."""
    line = " ".join(summary.split()).rstrip(".")
    first, _, rest = line.partition(" ")
    verb = first.lower()
    verb = verb if _VERB.fullmatch(verb) else verb.removesuffix("s")
    if (
        not _VERB.fullmatch(verb)
        or not 15 < len(line) < 90
        or not re.fullmatch(r"[\w ,'()/-]+", rest)
    ):
        return None
    return f"{verb} {rest}"


def _without_docstring(node: ast.FunctionDef) -> str:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": body, "decorator_list": []})
    return ast.unparse(ast.fix_missing_locations(bare))
