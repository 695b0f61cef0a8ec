"""`draftquant parity sampled`: how likely drawn output is to the target, with and without draft."""

import argparse

from ..api.parity_sampled import parity_sampled
from .parity_report import show_findings

VERB = parity_sampled


def run(options: argparse.Namespace) -> int:
    """Print the finding; the exit code is that of its verdict."""
    return show_findings(parity_sampled.run(options.settings), as_json=options.json)
