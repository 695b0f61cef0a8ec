"""Markdown of generated pages: tables, and text that stays text."""

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\*<>\[\]|#]|\b_|_\b)")
_CODE = re.compile(r"(`[^`]+`)")
MADE = "<!-- made by `python -m draftquant.scripts.dev.docs`: do not edit, a test compares -->"


def text(value: str) -> str:
    """Text as one line in which nothing is markup but `code`."""
    parts = _CODE.split(" ".join(value.split()))
    return "".join(
        part.replace("|", r"\|") if _CODE.fullmatch(part) else _SPECIAL.sub(r"\\\1", part)
        for part in parts
    )


def code(value: str) -> str:
    """Text as code, for a cell of a table too; nothing for nothing."""
    return f"`{value}`".replace("|", r"\|") if value else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown of one line."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(title: str, *parts: str) -> str:
    """A page of paragraphs and tables, an empty line between them."""
    return "\n\n".join([f"# {title}", MADE, *(part.strip("\n") for part in parts)]) + "\n"
