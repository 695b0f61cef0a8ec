"""`draftquant parity`: a verb for each thing that speculation, or quantizing, may not change."""

import argparse
import importlib
from types import ModuleType

VERBS = {
    "divergence": ("parity_divergence", "greedy output with a draft against output without one"),
    "tasks": ("parity_tasks", "scores that lm_eval gave the same items of two servers"),
    "run-tasks": ("parity_run_tasks", "let lm_eval ask a server, for 'tasks'"),
    "sampled": ("parity_sampled", "how likely drawn output is to the target, with and without"),
    "draft": ("parity_draft", "proposals of a quantized draft against those of BF16"),
}
"""Verb -> its module, and what it does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity VERB ...`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary.capitalize())
        _module(module).add_arguments(sub)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    return int(_module(VERBS[options.verb][0]).run(options))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
