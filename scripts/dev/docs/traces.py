"""The page of the trace format, from the manifest's dataclasses and the folder's docstring."""

import dataclasses
import inspect
import json
import re
import typing
from collections import abc
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any

from ....calibration.traces import manifest, stored_features, trace_folder
from .markdown import code, page, table, text

_PARTS = (
    manifest.TraceManifest,
    manifest.TargetIdentity,
    manifest.FeatureSpec,
    manifest.Sampling,
    manifest.LogprobSpec,
    manifest.TraceEntry,
    manifest.Shard,
    manifest.TablesFile,
)
_JSON_TYPES = {str: "text", int: "whole number", float: "number", NoneType: "null"}


def traces_page() -> str:
    """Files of a trace folder, and every key of trace.json."""
    layout = inspect.cleandoc(trace_folder.__doc__ or "")
    return page(
        "Trace format",
        "`draftquant record` and `draftquant traces import` write trace folders. draftquant"
        " reads them as hostile input: an unknown, missing or contradictory key is an error.",
        "```text\n" + layout + "\n```",
        "## How hidden states are stored",
        "```text\n" + inspect.cleandoc(stored_features.__doc__ or "") + "\n```",
        "## trace.json",
        "The whole file is a `TraceManifest`. Keys without a value are left out.",
        *(part(each) for each in _PARTS),
    )


def part(cls: type, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """The keys of a dataclass; `others` are meanings that its docstring lacks."""
    hints = typing.get_type_hints(cls)
    meanings = {**others, **attributes(cls)}
    rows = (
        [code(field.name), _type(hints[field.name]), text(meanings.get(field.name, ""))]
        for field in dataclasses.fields(cls)
    )
    about = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:")[0]
    heading = f"### {cls.__name__}\n\n{text(about)}\n\n"
    return heading + table(["key", "type", "meaning"], rows)


def _type(hint: Any) -> str:
    """A type as JSON has it."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return f"list of {_type(inner[0]).removesuffix('s')}s".replace("Entrys", "Entries")
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if typing.get_origin(hint) is abc.Mapping:
        return f"object of {_type(inner[1]).removesuffix('s')}s"
    if inner:
        return " or ".join(map(_type, inner))
    return _JSON_TYPES.get(hint) or str(hint.__name__)


def attributes(cls: type) -> Mapping[str, str]:
    """What the docstring of a dataclass says about its fields; `a, b: x` holds for both."""
    described = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in described.splitlines():
        entry = re.fullmatch(r"    ([a-z_0-9, ]+): (.*)", line)
        if entry and all(name.isidentifier() for name in entry[1].split(", ")):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    fields = [field.name for field in dataclasses.fields(cls)]
    return {name: _up_to_next(found[name], fields) for name in fields if name in found} | {
        name: rest for text_ in found.values() for name, rest in _inner(text_, fields)
    }


def _inner(description: str, fields: list[str]) -> list[tuple[str, str]]:
    """Fields that are described on another's line: "layers. vocab_size: token ids lie in"."""
    pieces = re.split(rf"\. ({'|'.join(fields)}): ", description)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def _up_to_next(description: str, fields: list[str]) -> str:
    return re.split(rf"\. (?:{'|'.join(fields)}): ", description)[0]
