"""`draftquant clean`: remove what killed runs left beside outputs."""

import argparse
from typing import TYPE_CHECKING

from ..api.clean import clean
from ..console import megabytes, print_json, stdout

if TYPE_CHECKING:
    from ..api.reports import CleanReport

VERB = clean


def run(options: argparse.Namespace) -> int:
    """Clean, and print what is gone and what is not."""
    report = clean.run(options.settings)
    if options.json:
        removed = [{"folder": name, "bytes": nbytes} for name, nbytes in report.removed.items()]
        left = [{"folder": name, "why": why} for name, why in report.left.items()]
        print_json({"removed": removed, "left": left})
    else:
        _print(report)
    return 0


def _print(report: "CleanReport") -> None:
    out = stdout()
    for name, nbytes in report.removed.items():
        out.line(f"removed {name} ({nbytes:,} bytes)")
    for name, why in report.left.items():
        out.line(f"left {name}: {why}")
    total = sum(report.removed.values())
    out.line(f"{len(report.removed)} removed, {megabytes(total)}; {len(report.left)} left")
