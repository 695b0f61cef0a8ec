"""`draftquant traces`: one verb each for what is done with trace folders beside recording them."""

import argparse

from ..parsers import CommandParser
from .verbs import Verbs, add_verbs, run_verb

VERBS: Verbs = {
    "import": ("traces_import", "make traces of hidden states that a trainer or vLLM dumped"),
    "info": ("traces_info", "what is in a trace folder"),
    "split": ("traces_split", "cut one in two that have no prompt in common"),
    "merge": ("traces_merge", "join several of one target"),
}


def add_arguments(parser: CommandParser) -> None:
    """`traces VERB ...`."""
    add_verbs(parser, VERBS)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    return run_verb(options, VERBS)
