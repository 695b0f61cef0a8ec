"""A command line, parsed and run up to where its prompts are divided."""

import argparse
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from ...quantize.files.command_line import command_line
from ...recipes.errors import visible
from ..api.division import Division, dividing
from ..api.listener import Listener
from ..api.option import spelling
from ..api.settings import Settings
from .divisions import DividedError, Planning
from .parts import ShardError
from .shard_folder import FirstAsked

DIVISIBLE = ("record", "replay", "gate", "compare", "tune")
"""Verbs that ask a division for what they compute."""


def first_asked(command: Sequence[str], listener: Listener) -> FirstAsked:
    """What a command line asks for first.

    Raises:
        ShardError: nothing that could be divided.
        DraftQuantError: as of the verb, of its settings and inputs.
    """
    planning = Planning()
    run_divided(command, listener, planning)
    if planning.found is None:
        raise ShardError(
            f"draftquant {command[0]}",
            "computes nothing along prompts with these arguments, so there is nothing to divide",
            fix="give drafts and --traces, or run the command as it is",
        )
    found = planning.found
    return FirstAsked(command=tuple(command), divisible=found.divisible, last=found.last)


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
