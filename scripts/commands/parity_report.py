"""What the verbs of `parity` share: printing findings, the report file, the exit code."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import print_json, print_table, stdout, table
from .common import share
from .gate_report import COLOURS
from .report_outputs import add_overwrite, check_report_file

if TYPE_CHECKING:
    from ...validate.parity.finding import Finding


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """`--report`."""
    parser.add_argument(
        "--report", type=Path, metavar="F.json", help="also write the findings here, for 'gate'"
    )
    add_overwrite(parser)


def add_confidence(parser: argparse.ArgumentParser) -> None:
    """`--confidence`."""
    parser.add_argument(
        "--confidence",
        type=share,
        default=0.95,
        metavar="SHARE",
        help="of each one-sided bound (default 0.95)",
    )


def check_report(options: argparse.Namespace) -> None:
    """Check, before any work, that the report can be written and what bounds are asked for.

    Raises:
        OutputError: the report exists already, or its folder does not.
        ParityError: the confidence is no share in (0.5, 1).
    """
    from ...validate.errors import ParityError

    check_report_file(options)
    confidence = getattr(options, "confidence", 0.95)
    if not 0.5 < confidence < 1:
        raise ParityError("--confidence", f"expected a share in (0.5, 1), got {confidence}",
                          fix="write 95 % as 0.95")  # fmt: skip


def report_findings(findings: "Sequence[Finding]", options: argparse.Namespace) -> int:
    """Print findings, write them where asked, and give the exit code of the worst verdict."""
    from ...validate.judging.verdict import EXIT_CODES, worst
    from ...validate.parity.finding import to_mapping, write_findings

    if options.report:
        write_findings(options.report, findings, overwrite=options.overwrite)
    if options.json:
        print_json(to_mapping(findings))
    else:
        _print(findings)
    return EXIT_CODES[worst([found.verdict for found in findings])]


def _print(findings: "Sequence[Finding]") -> None:
    numbers = ("figure", "lower bound", "upper bound", "threshold")
    found = table("Parity", "check", "of", *numbers, "verdict", right=numbers)
    for one in findings:
        found.row(
            one.check,
            one.what,
            *(_number(x) for x in (one.estimate, one.lower, one.upper, one.threshold)),
            one.verdict,
            style=COLOURS[one.verdict],
        )
    print_table(found)
    for one in findings:
        stdout().line((one.verdict, f"bold {COLOURS[one.verdict]}"), f": {one.what}: {one.reason}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
