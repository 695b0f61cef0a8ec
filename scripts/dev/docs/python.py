"""The page of the Python module: one line for each function and each type."""

import importlib
import inspect
import re
from typing import Any

from .markdown import code, page, table, text

api: Any = importlib.import_module(f"{__name__.partition('.')[0]}.api")
_INTRODUCTION = (
    "Every command is a function of `draftquant.api`. `help(dq.gate)` prints its arguments, what"
    " it returns, what it raises and an example; `help(dq.GateReport)` prints the fields of a"
    " result. [Python](../python.md) shows how they are used."
)
_IMPORT = "```python\nfrom draftquant import api as dq\n```"


def python_page() -> str:
    """Every function with its first arguments, then every type."""
    types = [name for name in api.__all__ if name not in api.VERBS and name != "VERBS"]
    return page(
        "Python",
        _INTRODUCTION,
        _IMPORT,
        "## Functions",
        table(("call", "what it does"), (_row(_call(name), name) for name in api.VERBS)),
        "## Types",
        table(("type", "what it is"), (_row(name, name) for name in types)),
    )


def _row(shown: str, name: str) -> tuple[str, str]:
    """What is shown, and the first sentence of its docstring."""
    paragraph = " ".join((inspect.getdoc(getattr(api, name)) or "").partition("\n\n")[0].split())
    return code(shown), text(re.split(r"(?<=[.])\s", paragraph)[0])


def _call(name: str) -> str:
    """`gate(baseline, candidate, traces, …)`: positional and required arguments."""
    every = inspect.signature(getattr(api, name)).parameters.values()
    shown = [
        each.name
        for each in every
        if each.kind < each.VAR_POSITIONAL
        or (each.kind < each.VAR_KEYWORD and each.default is each.empty)
    ]
    return f"{name}({', '.join([*shown, '…'])})"
