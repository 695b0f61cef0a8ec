"""Prompts of three domains, from text that an environment of Python holds: no network.

Code is sources of installed packages and of the standard library; prose is whole paragraphs of
their docstrings; lists are runs of items in docstrings. Whole files belong to training, gate or
calibration by a hash of their name, as in the trainer of the shipped pairs.
"""

import ast
import hashlib
import inspect
import itertools
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftquant.scripts.dev.training.corpus import SourceFile, Split
from transformers import PreTrainedTokenizerFast

DOMAINS = ("code", "prose", "lists")
COUNTS: dict[Split, int] = {"training": 6144, "gate": 900, "calibration": 900}
"""Prompts of a split, those whose continuation loops among them: the gate tells what loops hide."""
PROMPT_TOKENS = 64
_PER_FILE: dict[Split, int] = {"training": 8, "gate": 6, "calibration": 8}
_ITEM = re.compile(r"(\s*([-*+•]|\d+[.)])|[\w`*.]+( \([^)]*\))?\s?:)\s")
_PROSE = re.compile(r"[A-Z][^>|={}_\\]*[.:]")
_EXCLUDED = frozenset(
    {"tests", "test", "testing", "_vendor", "vendored", "pydoc_data", "idle_test"}
)


def write_prompts(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """`training.jsonl`, `gate.jsonl` and `calibration.jsonl`: as many prompts of each domain.

    A prompt is `PROMPT_TOKENS` tokens with the one at the beginning of a text, and its text
    re-encodes to just these. No prompt occurs twice.
    """
    found: dict[Split, dict[str, list[dict[str, str]]]] = {
        split: {domain: [] for domain in DOMAINS} for split in COUNTS
    }
    seen: set[str] = set()
    for file in _files():
        wanted = COUNTS[file.split] // len(DOMAINS)
        own = found[file.split]
        if all(len(prompts) >= wanted for prompts in own.values()):
            continue
        for domain, passages in _passages(file).items():
            if len(own[domain]) >= wanted:
                continue
            for text in _cut(passages[: _PER_FILE[file.split]], tokenizer):
                if text not in seen and len(own[domain]) < wanted:
                    seen.add(text)
                    name = f"{domain}-{len(own[domain])}"
                    own[domain].append({"id": name, "category": domain, "text": text})
    for split, by_domain in found.items():
        lines = [json.dumps(one) for same in zip(*by_domain.values(), strict=False) for one in same]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_long_prompts(
    tokenizer: PreTrainedTokenizerFast, folder: Path, num_tokens: int, count: int
) -> None:
    """`long-N.jsonl`: the beginnings of so many gate files, cut after `num_tokens` tokens."""
    lines: list[str] = []
    for file in _files():
        if len(lines) == count:
            break
        if file.split == "gate" and len(file.text) > 5 * num_tokens:
            for text in _cut([file.text], tokenizer, num_tokens):
                lines.append(json.dumps({"id": file.name, "category": "code", "text": text}))
    (folder / f"long-{num_tokens}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _files() -> Iterator[SourceFile]:
    """Sources in an order that depends on their names alone."""
    roots = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")]
    names = {
        path.relative_to(root).as_posix(): path
        for root in roots
        for path in root.rglob("*.py")
        if _EXCLUDED.isdisjoint(path.parts) and "site-packages" not in path.relative_to(root).parts
    }
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if 3_000 < names[name].stat().st_size < 300_000:
            yield SourceFile(name=name, text=names[name].read_text("utf-8", errors="replace"))


def _passages(file: SourceFile) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the escapes in other people's strings
        try:
            module = ast.parse(file.text)
        except SyntaxError:  # a template
            return found
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if not isinstance(node, ast.Module):
            found["code"].append("".join(lines[node.lineno - 1 : node.lineno + 40]))
        paragraphs = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            items = [bool(_ITEM.match(line)) for line in paragraph.splitlines()]
            if sum(items) >= 3:
                found["lists"].append(paragraph)
            elif _PROSE.fullmatch(paragraph) and not any(items):
                more = itertools.takewhile(_PROSE.fullmatch, paragraphs[i:])
                found["prose"].append("\n\n".join(more))
    return found


def _cut(
    passages: Sequence[str], tokenizer: PreTrainedTokenizerFast, num_tokens: int = PROMPT_TOKENS
) -> Iterator[str]:
    long = [text[: 8 * num_tokens] for text in passages if len(text) > 3 * num_tokens]
    for ids in tokenizer(long).input_ids if long else ():
        text = tokenizer.decode(ids[1:num_tokens])
        if len(ids) > num_tokens and tokenizer(text).input_ids == ids[:num_tokens]:
            yield text
