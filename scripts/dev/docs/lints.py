"""The page of all lints in the words of `inspect`, from their table and the source of families.

Messages quote the draft; what they quote stands as `…` here.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....quantize import drafts, lints
from ....recipes.regular_file import read_text
from .markdown import code, page, table, text


class Message(NamedTuple):
    """What one `Lint(...)` in the source says; a part that is computed is `…`."""

    name: str
    level: str
    cause: str
    remedy: str
    fixable: bool


def lints_page() -> str:
    """Every message of every lint."""
    found = sorted(messages())
    return page(
        "Messages of the lints",
        "These are the messages that `draftquant inspect` prints; … stands for a quotation from"
        " the draft. [Lints](../lints.md) explains each lint in a line. `draftquant quantize"
        " --fix-config` corrects those that are marked ✓, wherever only one value can be right.",
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
    """Each row of lints.toml, and each call of `Lint` in the families."""
    folder = Path(lints.__file__).parent
    calls = [node for path in sorted(folder.glob("*.py")) for node in ast.walk(parsed(path))]
    fixed = {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and _name(node.func) == "told" and len(node.args) > 1
        if isinstance(node.args[0], ast.Constant)
    }
    for key, row in tomllib.loads(read_text(folder / "lints.toml")).items():
        cause, remedy = (re.sub(r"\{[^}]*\}", "…", row[part]) for part in ("cause", "remedy"))
        name = row.get("name", key)
        yield Message(name, row["level"], cause, remedy, fixable=key in fixed)
    for path in sorted(Path(drafts.__file__).parent.rglob("*.py")):
        tree = parsed(path)
        constants = _constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) == "Lint":
                given = {each.arg or "": each.value for each in node.keywords}
                said = {key: _words(each, constants) for key, each in given.items()}
                yield Message(
                    name=said["name"],
                    level=said["level"],
                    cause=said["cause"],
                    remedy=said["remedy"],
                    fixable="fix" in given,
                )


def parsed(path: Path) -> ast.Module:
    """The source of a module."""
    return ast.parse(read_text(path))


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The module's own names for texts."""
    return {
        _name(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
    }


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _words(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text that an expression is known to make."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id in constants:
        return _words(constants[node.id], constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(each, constants) for each in node.values)
    if isinstance(node, ast.IfExp):
        return f"{_words(node.body, constants)} / {_words(node.orelse, constants)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left, constants) + _words(node.right, constants)
    return "…"
