"""The page of the Python module, from the functions and types that it has."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from ...frame.arguments import Option
from ...frame.keywords import Keywords
from .markdown import code, page, table, text

api: Any = importlib.import_module(f"{__name__.partition('.')[0]}.api")
_INTRODUCTION = (
    "Every verb of the command line is a function of `draftquant.api`, which takes what the"
    " command takes and returns what the command prints. `help(dq.gate)` prints what this page"
    " says."
)
_IMPORT = "```python\nfrom draftquant import api as dq\n```"
_SECTIONS = ("Args", "Returns", "Raises", "Example", "Attributes")
_ALSO = """\
Errors are `DraftQuantError`, which says where, what and how to fix it: `exc.where`, `exc.what`,
`exc.fix`. Warnings are Python warnings of the class `DraftQuantWarning`, and stand in
`report.warnings` too. Notes go to `logging.getLogger("draftquant")` at level INFO, stages at
DEBUG. A notebook shows a progress bar; a script shows one with
`listener=dq.ProgressListener()`, and nothing otherwise. Every report has a short `repr`, and a
table or a page in notebooks."""


def python_page() -> str:
    """Every function with its arguments, then every type with its fields."""
    types = [name for name in api.__all__ if name not in api.VERBS and name != "VERBS"]
    return page(
        "Python",
        _INTRODUCTION,
        _IMPORT,
        " ".join(_ALSO.split()),
        "## Functions",
        *(_function(name) for name in api.VERBS),
        "## Types",
        *(_type(name, getattr(api, name)) for name in types),
    )


def _function(name: str) -> str:
    verb: Any = getattr(api, name)
    sections = _sections(verb)
    signature = inspect.signature(verb)
    options, words = verb.form.options, Keywords(verb.form)
    rows = [
        [code(_spelled(each)), text(words(_meaning(options.get(each.name))))]
        for each in signature.parameters.values()
    ]
    parts = [f"### {name}", text(sections[""]), table(("argument", "meaning"), rows)]
    if "Example" in sections:
        parts.append(f"```python\n{sections['Example']}\n```")
    returns = _kind(signature.return_annotation)
    parts.append(f"Returns {code(returns)}. {text(sections['Returns'])}")
    parts.append(f"Raises {text(sections['Raises'])}")
    return "\n\n".join(part.strip("\n") for part in parts)


def _type(name: str, kind: Any) -> str:
    sections = _sections(kind)
    meanings = dict(_attributes(sections.get("Attributes", "")))
    shown = list(_fields(kind))
    parts = [f"### {name}", text(sections[""])]
    rows = [[code(f"{field}: {annotation}" if annotation else field), text(meanings.pop(field, ""))]
            for field, annotation in shown]  # fmt: skip
    rows += [[code(field), text(meaning)] for field, meaning in meanings.items()]
    for method, function in _methods(kind):
        call = "" if isinstance(function, property) else "()"
        rows.append([code(f"{method}{call}"), text(_sections(function)[""])])
    if rows:
        parts.append(table(("field or method", "meaning"), rows))
    return "\n\n".join(part.strip("\n") for part in parts)


def _sections(thing: object) -> dict[str, str]:
    """The docstring by its headings; "" is what stands before them."""
    found, heading = dict[str, list[str]](), ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        named = line.removesuffix(":")
        if line.endswith(":") and named in _SECTIONS:
            heading = named
        else:
            found.setdefault(heading, []).append(line)
    return {"": ""} | {name: inspect.cleandoc("\n".join(lines)) for name, lines in found.items()}


def _attributes(section: str) -> Iterator[tuple[str, str]]:
    """Name and meaning of each attribute; several may stand in one line, after full stops."""
    whole = " ".join(section.split())
    names = list(re.finditer(r"(?:^|(?<=\. )|(?<=\) ))([a-z_0-9]+(?:, [a-z_0-9]+)*): ", whole))
    ends = [*(each.start() for each in names), len(whole)][1:]
    for found, end in zip(names, ends, strict=True):
        for name in found[1].split(", "):
            yield name, whole[found.end() : end].strip()


def _fields(kind: Any) -> Iterator[tuple[str, str]]:
    """Fields and properties, with their types."""
    if dataclasses.is_dataclass(kind):
        yield from ((each.name, _kind(each.type)) for each in dataclasses.fields(kind))


def _methods(kind: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that its own docstring does not list."""
    for name, found in inspect.getmembers(kind):
        if name.startswith("_") or name in ("brief", "problem", "with_texts", "args"):
            continue
        if inspect.isfunction(found) or isinstance(found, property):
            yield name, found


def _spelled(parameter: inspect.Parameter) -> str:
    """`num_draft_tokens: int | None = None`."""
    if parameter.name == "listener":
        return "listener: Listener"
    kind = _kind(parameter.annotation)
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {kind}{default}"


def _kind(annotation: Any) -> str:
    """A type by the last part of its name."""
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", shown).replace("PathLike[str]", "PathLike")


def _meaning(option: Option | None) -> str:
    if option is None:
        return "sees how far the run is"
    bounds = f" ({option.bounds})" if option.bounds is not None else ""
    return option.help + bounds
