"""`draftquant parity`: a verb for each thing that speculation, or quantizing, may not change."""

import argparse

from ..parsers import CommandParser
from .verbs import Verbs, add_verbs, run_verb

VERBS: Verbs = {
    "divergence": ("parity_divergence", "greedy output with a draft against output without one"),
    "tasks": ("parity_tasks", "scores that lm_eval gave the same items of two servers"),
    "run-tasks": ("parity_run_tasks", "let lm_eval ask a server, for 'tasks'"),
    "sampled": ("parity_sampled", "how likely drawn output is to the target, with and without"),
    "draft": ("parity_draft", "proposals of a quantized draft against those of BF16"),
}


def add_arguments(parser: CommandParser) -> None:
    """`parity VERB ...`."""
    add_verbs(parser, VERBS)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    return run_verb(options, VERBS)
