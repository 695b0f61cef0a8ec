"""Scenes: commands that run one after the other in a folder, as commands.toml has them."""

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Scene:
    """Some commands.

    Attributes:
        name: also of the folder that they write into, `{here}` in a line.
        commands: lines behind the word `draftquant`, by name.
        after: scenes whose folders these commands read.
        drafts: of drafts.json, each written as `{here}/NAME` before the first command.
        made: of made.py, each written as `{here}/NAME` before the first command.
        files: texts by path, written before the first command.
        server: the engine of which served.json has the answers, `{server}` in a line; "states" is
            a server that records, into `{here}/shared`.
    """

    name: str
    commands: Mapping[str, str]
    after: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    files: Mapping[str, str] | None = None
    server: str | None = None


def read_scenes(path: Path) -> dict[str, Scene]:
    """The scenes by name; `{a,b}` in a line is one command with each, `{1}` what was chosen."""
    scenes = {}
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        commands = {
            "-".join([key, *values]): line.replace("{here}", name)
            for key, lines in table["commands"].items()
            for values, line in _each(lines)
        }
        needed = {key: tuple(table.get(key, ())) for key in ("after", "drafts", "made")}
        own = {key: table.get(key) for key in ("files", "server")}
        scenes[name] = Scene(name, commands, **needed, **own)
    return scenes


def with_needed(scenes: Mapping[str, Scene], names: Sequence[str]) -> list[Scene]:
    """These scenes and all whose folders they read, in the order of the file."""
    needed: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left.extend(scenes[name].after)
    return [scene for name, scene in scenes.items() if name in needed]


def _each(line: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The line with every combination of its braces, and the values that were chosen."""
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(_BRACES.split(line))]
    for chosen in itertools.product(*choices):
        values, whole = tuple(chosen[1::2]), "".join(chosen)
        for number, value in enumerate(values, start=1):
            whole = whole.replace(f"{{{number}}}", value)
        yield values, whole
