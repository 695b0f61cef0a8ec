"""What an engine's own class did with drafts that no family reads: rows of executed folders.

`executed_classes.json` is what `experiments/run classes` found: a small folder for each class,
plain and quantized. A folder like one of them, in names, flags and declaration, with shapes that
follow from the same keys of config.json, is answered as that one was. Any other is UNKNOWN.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...recipes.regular_file import read_text
from ...recipes.strict_json import parse_json
from ..drafts.architectures import declared_architecture
from ..drafts.config_reader import with_text_config
from ..drafts.engine_traits import Finding
from ..files.checkpoint import Checkpoint

Shapes = Mapping[str, Sequence[int]]
_NO_MATTER = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache", "name"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
_DECLARED = "quantization_config"
_TRY = "try it in the server"
_OF_TARGET = (
    "keep it in BF16: beside a BF16 target this class does not read the draft's own declaration;"
    " in a target that is quantized alike (graft) it may"
)


@functools.cache
def _rows() -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = parse_json(read_text(Path(__file__).with_suffix(".json")))
    return rows


def executed(checkpoint: Checkpoint, asked: str) -> Sequence[Finding] | None:
    """The findings of a question "ENGINE ARCH TP"; () = it loads; None where no class was asked."""
    name = declared_architecture(checkpoint.config)
    rows = [row for row in _rows() if declared_architecture(row["config"]) == name]
    rows = [row for row in rows if any(asked in said for said in row["answers"].values())]
    if not rows:
        return None
    other = ""
    for row in rows:
        other = _difference(checkpoint, row)
        if not other:
            verdict = next(v for v, said in row["answers"].items() if asked in said)
            if verdict not in _STAGES:
                return ()
            remedy = _OF_TARGET if _DECLARED in row["config"] else _TRY
            return [Finding(_STAGES[verdict], row["error"], remedy)]
    what = f"Its class for {name} was executed with folders that differ in {other}"
    return [Finding("unknown", what, _TRY)]


_STAGES: Mapping[str, Any] = {"REFUSED": "load", "LOADS BUT WRONG": "wrong"}


def _difference(checkpoint: Checkpoint, row: Mapping[str, Any]) -> str:
    """The first thing that is otherwise than in an executed folder; "" where nothing is."""
    ours, theirs = (with_text_config(config) for config in (checkpoint.config, row["config"]))
    for key in sorted((ours.keys() | theirs.keys()) - _NO_MATTER - {_DECLARED}):
        mine, other = ours.get(key), theirs.get(key)
        if mine != other and (isinstance(mine, bool | str) or isinstance(other, bool | str)):
            return f"{key} of config.json ({other!r}, not {mine!r})"
    found = {t.name: [t.dtype, *t.shape] for t in checkpoint.tensors.values()}
    mine, other = (dict(_numbered(*one)) for one in ((found, ours), (row["tensors"], theirs)))
    if unlike := sorted(mine.keys() ^ other.keys()):
        return unlike[0]
    if _spelled(ours) != _spelled(theirs):
        return _DECLARED
    for name, (dtype, *shape) in mine.items():
        pairs = list(zip(shape, other[name][1:], strict=False))
        alike = dtype == other[name][0] and len(shape) == len(other[name]) - 1
        if not alike or not all(_follows(a, b, ours, theirs) for a, b in pairs):
            return f"{name} {shape}"
    return ""


def _numbered(tensors: Shapes, config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Names with "L" for the number of the target's layers, and "E" for an expert's."""
    experts = {found[1] for name in tensors if (found := re.search(r"experts\.(\d+)\.", name))}
    layers = str(config.get("num_hidden_layers"))
    for name, shape in tensors.items():
        plain = re.sub(r"experts\.\d+\.", "experts.E.", name)
        yield _NUMBER.sub(lambda n: "L" if n[0] == layers else n[0], plain), shape
    if experts:
        yield "experts", ["", len(experts)]  # type: ignore[list-item]


def _spelled(config: Mapping[str, Any]) -> str:
    text = json.dumps(config.get(_DECLARED), sort_keys=True)
    names = re.sub(r"experts\.\d+\.", "experts.E.", text)
    return json.dumps(sorted(set(re.findall(r'"[^"]*"', _NUMBER.sub("N", names)))))


_WIDTH, _MULTIPLES = "hidden_size", (2, 3)
"""Of what a fusion reads."""
_PACKED = (8, 128)
"""Values in an element of a row: eight of four bits, a group under one scale."""


def _follows(mine: int, other: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether one expression over keys of config.json gives both dimensions, or none the other."""
    both = [k for k in theirs if type(theirs[k]) is type(ours.get(k)) is int]
    one = [(theirs[k], ours[k]) for k in both]
    wide = [(theirs[_WIDTH] * n, ours[_WIDTH] * n) for n in _MULTIPLES if _WIDTH in both]
    two = [(theirs[a] * theirs[b], ours[a] * ours[b]) for a, b in itertools.combinations(both, 2)]
    packed = [(then / n, now / n) for then, now in (*one, *two, *wide) for n in _PACKED]
    for level in ([*one, *wide], two, packed):  # the simplest that gives it decides
        if told := [now for then, now in level if then == other]:
            return mine in told
    return mine == other
