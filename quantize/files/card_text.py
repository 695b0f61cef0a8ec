"""The model card, README.md: its front matter, the part that draftquant writes, and all other text.

Text of others may be hostile: it is escaped where it is quoted in our part, between two marks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...recipes.errors import CheckpointError, visible
from ...recipes.regular_file import check_own, read_text
from ...recipes.strict_json import reading

CARD_FILE = "README.md"
BEGIN, END = "<!-- card of draftquant -->\n", "<!-- end of the card of draftquant -->\n"
_FENCE = "---\n"
_MOST_FRONT = 64 << 10  # characters
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag", "library_name")
_NUMBER = re.compile(r"[-+]?[\d,.]*\d%?|")  # or an empty cell
_WORD = re.compile(r"[\w .:/+@#?&=%~-]{1,200}")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&]|:(?=//)|(?<=www)\.)")  # anywhere
_AT_START = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+#=]))(.)")  # lists, headings


def read_card(folder: Path) -> str:
    """README.md of a folder, "" where it has none."""
    path = folder / CARD_FILE
    check_own(folder, CARD_FILE)
    with reading(path, CheckpointError, "repair or remove it"):
        return read_text(path) if path.exists() else ""


def split_front(card: str) -> tuple[str, str]:
    """The front matter with its fences, "" where there is none, and what follows it."""
    if not card.startswith(_FENCE):
        return "", card
    inner, fence, text = card.removeprefix(_FENCE).partition(f"\n{_FENCE}")
    return (f"{_FENCE}{inner}{fence}\n", text.lstrip("\n")) if fence else ("", card)


def _front_keys(card: str) -> Mapping[str, Any]:
    """The keys of a front matter; none if it is not YAML, or longer than any real one."""
    front, _ = split_front(card)
    if not front or len(front) > _MOST_FRONT:
        return {}
    try:
        keys = yaml.safe_load(front.removeprefix(_FENCE).rpartition(_FENCE)[0])
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return keys if isinstance(keys, dict) else {}


def is_ours(card: str) -> bool:
    """Whether draftquant wrote a part of it."""
    return BEGIN in card and END in card.partition(BEGIN)[2]


def around(card: str) -> tuple[str, str]:
    """What others wrote before and after our part, without front matter."""
    _, text = split_front(card)
    if not is_ours(text):
        return "", text
    before, _, rest = text.partition(BEGIN)
    return before, rest.partition(END)[2].lstrip("\n")


def without_ours(card: str) -> str:
    """What others wrote, with the front matter unless nothing follows it."""
    if not is_ours(card):
        return card
    text = "".join(around(card))
    return split_front(card)[0] + text if text.strip() else ""


def inherited(card: str) -> dict[str, Any]:
    """Keys of a front matter that hold for a quantized draft too, if their values are short."""
    keys = _front_keys(card)
    kept = {key: keys[key] for key in _INHERITED if key in keys}
    return {key: value for key, value in kept.items() if _are_words(value)}


def card_text(front: Mapping[str, Any], ours: Iterable[str], *, before: str, behind: str) -> str:
    """A whole card: front matter, our paragraphs, and what others wrote around them."""
    keys = {key: value for key, value in front.items() if value}
    matter = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000)
    text = before + BEGIN + "\n" + "\n\n".join(ours) + "\n\n" + END
    return f"{_FENCE}{matter}{_FENCE}\n{text}" + (f"\n{behind}" if behind else "")


def prose(text: object) -> str:
    """Foreign text that renders unchanged, at the beginning of a line or inside it."""
    escaped = _SPECIAL.sub(r"\\\1", visible(str(text)).strip())
    return _AT_START.sub(r"\1\\\2", escaped)


def code(text: object) -> str:
    """Foreign text as code inside a line, even of a table."""
    shown = visible(str(text)).replace("|", r"\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown[:1] in ("`", " ", "") or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"


def code_block(text: str) -> str:
    """Lines of foreign text as a block of code."""
    lines = [visible(line) for line in text.split("\n")]
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *lines, fence])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; columns of numbers are aligned right."""
    lines = [list(head), *map(list, rows)]
    numbers = [all(_NUMBER.fullmatch(row[i]) for row in lines[1:]) for i in range(len(head))]
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], rule, *lines[1:]))


def _are_words(value: object) -> bool:
    words = value if isinstance(value, list) and len(value) <= 100 else [value]
    return all(isinstance(word, str) and _WORD.fullmatch(word) for word in words)
