"""`draftquant traces`: one verb each for what is done with trace folders beside recording them."""

import argparse
import importlib
from types import ModuleType

VERBS = {
    "import": ("traces_import", "make traces of hidden states that a trainer or vLLM dumped"),
    "info": ("traces_info", "what is in a trace folder"),
    "split": ("traces_split", "cut one in two that have no prompt in common"),
    "merge": ("traces_merge", "join several of one target"),
}
"""Verb -> its module, and what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`traces VERB ...`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary.capitalize())
        _module(module).add_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    return int(_module(VERBS[options.verb][0]).run(options))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
