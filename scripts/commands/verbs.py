"""What stands below a command: its settings, or verbs of which each has its own."""

import argparse
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..examples import EXAMPLES
from ..parsers import CommandParser, sentence

if TYPE_CHECKING:
    from ..api.verb import Verb


class Below(NamedTuple):
    """A verb below a command.

    Attributes:
        run: runs it by the parsed options and prints; its exit code.
    """

    verb: "Verb[..., Any, Any]"
    run: Callable[[argparse.Namespace], int]
    summary: str


Verbs = Mapping[str, Below]
"""Name -> verb."""


def add_arguments(parser: CommandParser, module: ModuleType) -> None:
    """What a command takes: the settings of its `VERB`, or the `VERBS` that stand below it.

    One that is no verb adds its own.

    `EPILOG` of its module stands below the help, where exit codes of its own are told. Without a
    verb the first one runs where the module says `DEFAULT`.
    """
    parser.epilog = getattr(module, "EPILOG", None)
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
        return
    if hasattr(module, "VERB"):
        parser.takes(module.VERB.settings)
        return
    required = not hasattr(module, "DEFAULT")
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=required)
    for name, below in module.VERBS.items():
        examples = EXAMPLES.get(f"{parser.prog.partition(' ')[2]} {name}", ())
        sub = parsers.add_parser(
            name, help=below.summary, description=sentence(below.summary), examples=examples
        )
        assert isinstance(sub, CommandParser)  # argparse makes it of its parent's class
        sub.takes(below.verb.settings)


def run_verb(options: argparse.Namespace, verbs: Verbs) -> int:
    """Run the verb that was given; its exit code."""
    return verbs[options.verb].run(options)
