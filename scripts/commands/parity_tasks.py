"""`draftquant parity tasks`: scores that lm_eval gave the same items of two servers."""

import argparse
from typing import TYPE_CHECKING

from ..api.parity_tasks import parity_tasks
from ..console import stdout
from .parity_report import show_findings

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding

VERB = parity_tasks


def run(options: argparse.Namespace) -> int:
    """Print both scores, then the findings; the exit code is that of the worst."""
    found = parity_tasks.run(options.settings)
    if not options.json:
        for one in found.findings:
            _print_scores(one)
    return show_findings(found, as_json=options.json)


def _print_scores(one: "Finding") -> None:
    found = one.details[0]
    counts = ""
    if "mcnemar_p" in found:
        counts = (
            f"; only A right {found['only_first_right']}, only B right"
            f" {found['only_second_right']}, McNemar p = {found['mcnemar_p']:.3f}"
        )
    stdout().line(
        f"{one.what}: A {found['first']:.4f}, B {found['second']:.4f}"
        f" over {found['items']:,} items{counts}"
    )
