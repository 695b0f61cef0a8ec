"""`draftquant parity tasks`: scores that lm_eval gave the same items of two servers."""

import argparse
from pathlib import Path

from ..console import stdout
from .common import share
from .parity_report import (
    add_confidence,
    add_report_arguments,
    check_report,
    report_findings,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity tasks A_SAMPLES B_SAMPLES --max-score-drop X`."""
    parser.add_argument(
        "first",
        type=Path,
        metavar="A_SAMPLES",
        help="of the server to be matched: folder of lm_eval's --log_samples, or one of its files",
    )
    parser.add_argument("second", type=Path, metavar="B_SAMPLES", help="of the other server")
    parser.add_argument(
        "--max-score-drop",
        type=share,
        metavar="MARGIN",
        help="margin in the metric's own unit: of right answers 0.01 or 1%%",
    )
    for way in ("higher", "lower"):
        parser.add_argument(
            f"--{way}-is-better",
            nargs="+",
            default=[],
            metavar="METRIC",
            help="of metrics whose direction neither lm_eval's results nor their name says",
        )
    add_confidence(parser)
    add_report_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...validate.parity.lm_eval_samples import read_samples
    from ...validate.parity.metric_directions import Directions
    from ...validate.parity.task_findings import task_findings

    check_report(options)
    findings = task_findings(
        read_samples(options.first),
        read_samples(options.second),
        max_score_drop=options.max_score_drop,
        confidence=options.confidence,
        directions=Directions(higher=options.higher_is_better, lower=options.lower_is_better),
    )
    if not options.json:
        for one in findings:
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
    return report_findings(findings, options)
