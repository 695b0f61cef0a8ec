"""`draftquant parity divergence`: greedy output with a draft against output without one."""

import argparse

from ..api.parity_divergence import parity_divergence
from .parity_report import show_findings

VERB = parity_divergence


def run(options: argparse.Namespace) -> int:
    """Print the findings; the exit code is that of the worst."""
    return show_findings(parity_divergence.run(options.settings), as_json=options.json)
