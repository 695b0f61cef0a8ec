"""Commands of several verbs: each verb is a module beside this one, imported when it is needed."""

import argparse
import importlib
from collections.abc import Mapping
from types import ModuleType

from ..examples import EXAMPLES
from ..parsers import CommandParser, sentence

Verbs = Mapping[str, tuple[str, str]]
"""Verb -> its module, and what it does."""


def add_verbs(parser: CommandParser, verbs: Verbs, *, required: bool = True) -> None:
    """A parser for each verb, with the arguments of its module."""
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=required)
    for verb, (module, summary) in verbs.items():
        examples = EXAMPLES.get(f"{parser.prog.partition(' ')[2]} {verb}", ())
        sub = parsers.add_parser(
            verb, help=summary, description=sentence(summary), examples=examples
        )
        assert isinstance(sub, CommandParser)  # argparse makes it of its parent's class
        add_arguments(sub, _module(module))


def add_arguments(parser: CommandParser, module: ModuleType) -> None:
    """What a command takes: the settings of its verb, or the verbs that stand below it.

    `EPILOG` of its module stands below the help, where exit codes of its own are told.
    """
    if hasattr(module, "VERB"):
        parser.takes(module.VERB.settings)
        parser.epilog = getattr(module, "EPILOG", None)
    else:
        module.add_arguments(parser)


def run_verb(options: argparse.Namespace, verbs: Verbs) -> int:
    """Run the verb that was given; its exit code."""
    return int(_module(verbs[options.verb][0]).run(options))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
