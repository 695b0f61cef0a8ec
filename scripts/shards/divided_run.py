"""Command lines, read of a file, parsed and run up to where their prompts are divided."""

import argparse
import dataclasses
import importlib
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...quantize.files.command_line import command_line
from ...recipes.errors import visible
from ...recipes.regular_file import read_text
from ..api.division import Division, dividing
from ..api.listener import Listener
from ..api.option import spelling
from ..api.settings import Settings
from .divisions import DividedError, Planning
from .parts import DIVISIBLE, ShardError
from .shard_folder import FirstAsked

_OUTPUTS = ("out", "report", "html", "markdown", "junit", "golden", "plot")
"""Settings that name a file or folder to write."""


def read_commands(path: Path) -> tuple[tuple[str, ...], ...]:
    """The words of each line of a file, quoted as a shell quotes; behind a # is a comment.

    Raises:
        ShardError: it cannot be read, or holds no command, or one twice.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ShardError(path, f"cannot be read: {exc}", fix="give a text file") from exc
    found: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as exc:
            raise ShardError(f"{path}:{number}", str(exc), fix="close the quotation") from exc
        words = words[1:] if words[:1] == ("draftquant",) else words
        if words in found:
            what = f"is the command of line {found[words]} again"
            raise ShardError(f"{path}:{number}", what, fix="remove one of them")
        if words:
            found[words] = number
    if not found:
        raise ShardError(path, "holds no command", fix="gate A B --traces T --report R.json")
    return tuple(found)


def first_asked(command: Sequence[str], listener: Listener) -> FirstAsked:
    """What a command line asks for first.

    Raises:
        ShardError: nothing that could be divided.
        DraftQuantError: as of the verb, of its settings and inputs.
    """
    planning = Planning()
    # Without traces it would run to its end here, and write its files.
    if getattr(_settings(command, listener), "traces", command) is not None:
        run_divided(command, listener, planning)
    if planning.found is None:
        raise ShardError(
            f"draftquant {command[0]}",
            "computes nothing along prompts with these arguments, so there is nothing to divide",
            fix="give drafts and --traces, or run the command as it is",
        )
    found = planning.found
    return FirstAsked(command=tuple(command), divisible=found.divisible, last=found.last)


def check_outputs(commands: Iterable[Sequence[str]], listener: Listener) -> None:
    """Refuse commands of which one would write what another one has written.

    Raises:
        ShardError: two name the same file.
        DraftQuantError: see `run_divided`.
    """
    found: dict[str, int] = {}
    for number, command in enumerate(commands, 1):
        settings = _settings(command, listener)
        given = [path for name in _OUTPUTS if (path := getattr(settings, name, None)) is not None]
        for path in given:
            first = found.setdefault(os.path.realpath(path), number)
            if first != number:
                raise ShardError(
                    path,
                    f"is written by command {number}, and by command {first} already",
                    fix="give each command files of its own",
                )


def run_divided(command: Sequence[str], listener: Listener, division: Division) -> Any:
    """Run a verb, of whose work a division is asked.

    Returns:
        Its report; None where the division ended the run.

    Raises:
        ShardError: it is none of `DIVISIBLE`.
        DraftQuantError: as of the verb.
    """
    settings = _settings(command, listener)
    verb = getattr(importlib.import_module(f"..api.{command[0]}", __package__), command[0])
    with dividing(division), command_line(["draftquant", *map(visible, command)]):
        try:
            return verb.run(settings)
        except DividedError:
            return None


def _settings(command: Sequence[str], listener: Listener) -> Settings:
    from ..cli import parser_of
    from ..parsers import COMMON

    name = command[0] if command else ""
    if name not in DIVISIBLE:
        raise ShardError(
            "COMMAND",
            f"expected one of {', '.join(DIVISIBLE)}, got {name!r}",
            fix="draftquant shards plan --shards 4 --out ./shards -- replay A B --traces T",
        )
    options = argparse.Namespace(**COMMON)
    parser_of(command).parse_args(list(command), namespace=options)
    settings: Settings = dataclasses.replace(options.settings, listener=listener)
    settings.check_bounds(spelling)
    settings.check()
    return settings
