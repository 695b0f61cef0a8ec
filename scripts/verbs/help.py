"""`help`: the list of commands, or the help of one."""

import argparse
from typing import TYPE_CHECKING

from ..frame.streams import RESULTS

if TYPE_CHECKING:
    from ..frame.parsers import CommandParser


def add_arguments(parser: "CommandParser") -> None:
    """Names of a command and of a verb below it; none for the list."""
    parser.add_argument(
        "names", nargs="*", metavar="COMMAND", help="a command, and a verb below it (default: all)"
    )


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from ..cli import parser_of

    parser = parser_of(options.names)
    for name in options.names:
        parser = parser.below(name)
    RESULTS.write(parser.format_help())
    return 0
