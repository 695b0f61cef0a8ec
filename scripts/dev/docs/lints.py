"""The page of all lints in the words of `inspect`, from their table.

Messages quote the draft; each quotation is `…` here.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....quantize import drafts, lints
from ....quantize.drafts import FAMILIES
from ....recipes.regular_file import read_text
from .markdown import code, page, table, text


class Message(NamedTuple):
    """The message of a lint, with `…` for each quotation."""

    name: str
    level: str
    cause: str
    remedy: str
    fixable: bool


def lints_page() -> str:
    """Every message of every lint."""
    found = sorted(messages())
    return page(
        "Lints",
        "A lint is a warning about a draft that is well-formed but that a trainer, vLLM 0.33 or"
        " SGLang 0.5.23 reads otherwise than you may expect. `draftquant inspect` prints these"
        " messages; … stands for a quotation from the draft. `draftquant quantize --fix-config`"
        " corrects those that are marked ✓ in the output's config.json, never in the source.",
        table(
            ["lint", "level", "✓", "cause", "remedy"],
            (
                [
                    code(each.name),
                    each.level,
                    "✓" if each.fixable else "",
                    text(each.cause),
                    text(each.remedy),
                ]
                for each in found
            ),
        ),
    )


def messages() -> Iterator[Message]:
    """Each row of lints.toml."""
    folder = Path(drafts.__file__).parent
    modules = [*folder.rglob("*.py"), *Path(lints.__file__).parent.glob("*.py")]
    calls = [node for path in modules for node in ast.walk(parsed(path))]
    fixed = {row for family in FAMILIES for row, _ in family.misnamed.values()} | {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and _name(node.func) == "told" and len(node.args) > 1
        if isinstance(node.args[0], ast.Constant)
    }
    for key, row in tomllib.loads(read_text(folder / "lints.toml")).items():
        cause, remedy = (re.sub(r"\{[^}]*\}", "…", row[part]) for part in ("cause", "remedy"))
        name = row.get("name", key)
        yield Message(name, row["level"], cause, remedy, fixable=key in fixed or "fix" in row)


def parsed(path: Path) -> ast.Module:
    """The source of a module."""
    return ast.parse(read_text(path))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
