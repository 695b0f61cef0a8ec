"""The rows of the data files beside this module: what engines do, as it was executed or read.

`targets.toml` has the models that hand a draft the hidden states of their layers, `schemes.toml`
the classes that take a declared scheme, `meanings.toml` what an engine's error means, and
`versions.toml` what is data of a version. What no row says is not known.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...recipes.packages import counts, rows_beside
from ..drafts.engine_traits import Finding
from .contract import EngineName, Scheme

Rows = Sequence[Mapping[str, Any]]
Facts = Mapping[str, Any]
"""What rows of rules.toml look at; what is to be found out only if a row asks is a function."""
_RAW = re.compile(r"\w*(Error|Exception)\b")
_CHOICE = re.compile(r"\{(.*?)\}")
_INTEGERS = re.compile(r"int(?P<bits>\d)(?P<plus>\+?) \D*(?P<size>\d*)")


def data_file(name: str) -> Mapping[str, Any]:
    """One of the data files beside this module."""
    return rows_beside(__file__, name)


def version_rows() -> Iterator[dict[str, Any]]:
    """Every known version, the older ones of an engine first, as `Engine` is told of it."""
    for row in data_file("versions")["engine"]:
        yield {key: _frozen(key, value) for key, value in row.items()}


def _frozen(key: str, value: Any) -> Any:
    if key in ("methods", "mtp_types", "registered"):
        return frozenset(value.split())
    if key in ("models", "experts_by_name"):
        return frozenset(value)
    return tuple(value) if isinstance(value, list) else value


def refuses_target(engine: str, version: str, method: str, name: str | None) -> str | None:
    """The error with which an engine refuses a target that hands out no hidden states.

    "" where it hands them out, or need not; None where that is not known. `method`: as which the
    draft is served, in small letters; `name`: the target's, in architectures of its config.json.
    """
    table = data_file("targets")
    errors = table["errors"].get(engine, {method: ""})
    if method not in errors:
        return ""  # nothing is asked of the target
    for row in table["row"]:
        if (row["engine"], row["version"]) == (engine, version) and name in row["classes"].split():
            if method in row.get("serves", ()):
                return ""
            if method in row.get("refuses", ()):
                return str(errors[method]).format(name)
    return None


@functools.cache
def schemes_of(engine: EngineName, version: str) -> Mapping[str, Mapping[str, Scheme]]:
    """Signature of a declared scheme -> GPU, or "*" -> what becomes of it."""
    table, found = data_file("schemes"), dict[str, dict[str, Scheme]]()
    for row in table["row"]:
        for signature in _signatures(row) if _is_of(row, engine, version) else ():
            refused = table["refused"][engine][row["refused"]] if "refused" in row else None
            scheme = Scheme(
                row["class"],
                refused and _filled(refused, signature),
                row.get("own_global_scales", ""),
                row.get("whole_rows", False),
                tuple(row.get("not_read", ())),
            )
            found.setdefault(signature, {}).update(dict.fromkeys(row.get("gpus", ["*"]), scheme))
    return found


@functools.cache
def concatenated() -> Mapping[str, str]:
    """Signature -> SGLang's error where it puts q_a and kv_a of MLA together."""
    rows: Rows = data_file("schemes")["concatenated"]
    return {signature: row["error"] for row in rows for signature in _signatures(row)}


def _signatures(row: Mapping[str, Any]) -> Iterator[str]:
    """Every spelling of "awq {int4,int4=} channel none"."""
    for pattern in row["schemes"]:
        parts = _CHOICE.split(pattern)  # what is chosen from stands at each second place
        yield from map("".join, itertools.product(*(
            part.split(",") if i % 2 else [part] for i, part in enumerate(parts)
        )))  # fmt: skip


def _filled(refused: Sequence[Any], signature: str) -> Finding:
    stage, text, remedy = refused
    if (match := _INTEGERS.search(signature)) is not None:
        text = text.format(bits=match["bits"], sym=not match["plus"], size=match["size"])
    return Finding(stage, text, remedy)


def all_rules(engine: EngineName, version: str, about: str, facts: Facts) -> Iterator[Finding]:
    """What an engine says by the rows of rules.toml about them."""
    for row in data_file("rules")[about]:
        if _is_of(row, engine, version) and counts(row, facts):
            yield _finding(row["says"], facts)


def _is_of(row: Mapping[str, Any], engine: EngineName, version: str) -> bool:
    """A row without an engine or without versions is of every one."""
    return row.get("engine", engine) == engine and version in row.get("versions", [version])


def _finding(says: Sequence[Any], facts: Facts) -> Finding:
    stage, text, remedy = says
    return Finding(stage, text.format_map(facts), remedy.format_map(facts))


def said(name: str, /, **values: object) -> Finding:
    """A finding of [said] in rules.toml, with what is put into its sentences."""
    return _finding(data_file("rules")["said"][name], values)


@functools.cache
def meanings() -> Sequence[tuple[re.Pattern[str], str]]:
    """An error of an engine, and what it means with {engine}, {gpu} and the groups of the error."""
    return [(re.compile(row["error"]), row["means"]) for row in data_file("meanings")["row"]]


def is_raw(text: str) -> bool:
    """Whether a reason is an error of Python's, which says nothing to whom reads it."""
    return _RAW.match(text) is not None


def meaning(text: str, *, engine: str, gpu: str) -> str | None:
    """What an error of an engine means; None where no row says it."""
    for pattern, sentence in meanings():
        if match := pattern.search(text):
            return sentence.format(*match.groups(), engine=engine, gpu=gpu)
    return None


def explained(text: str, *, engine: str, gpu: str) -> str:
    """A reason as a person reads it: what it means, then the engine's own text in brackets."""
    if not is_raw(text):
        return text
    said = meaning(text, engine=engine, gpu=gpu) or f"{engine} ends with an error of its own"
    return f"{said} [{text}]"
