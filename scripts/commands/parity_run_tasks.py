"""`draftquant parity run-tasks`: let lm_eval ask a server, for 'parity tasks'."""

import argparse

from ..api.parity_run_tasks import parity_run_tasks
from ..console import print_json, stdout

VERB = parity_run_tasks


def run(options: argparse.Namespace) -> int:
    """Let it ask, and print how many items were answered."""
    samples = parity_run_tasks.run(options.settings)
    if options.json:
        print_json({task: {"samples": str(one.path), "items": {name: len(items) for name, items
                    in one.items.items()}} for task, one in samples.items()})  # fmt: skip
        return 0
    for task, one in samples.items():
        counts = ", ".join(f"{len(items):,} ({name})" for name, items in one.items.items())
        stdout().line((task, "bold"), f": items {counts}: {one.path}")
    return 0
