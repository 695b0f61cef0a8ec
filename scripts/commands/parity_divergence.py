"""`draftquant parity divergence`: greedy output with a draft against output without one."""

import argparse
from pathlib import Path

from .parity_report import add_report_arguments, check_report, report_findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity divergence PLAIN SPECULATIVE...`."""
    parser.add_argument(
        "plain",
        type=Path,
        metavar="PLAIN",
        help="measured without a draft, at temperature 0, with --top-logprobs 2",
    )
    parser.add_argument(
        "speculative",
        type=Path,
        nargs="+",
        metavar="SPECULATIVE",
        help="the same prompts with a draft: BF16, quantized",
    )
    parser.add_argument(
        "--plain-again",
        type=Path,
        metavar="MEASUREMENT",
        help="PLAIN measured again at another concurrency: what numeric noise does there",
    )
    parser.add_argument(
        "--max-gap",
        type=float,
        metavar="NATS",
        help="nats between the target's two most likely tokens up to which a difference is noise"
        " (default 0.25, or twice what --plain-again shows, up to 0.5)",
    )
    parser.add_argument(
        "--max-hazard-ratio",
        type=float,
        metavar="RATIO",
        help="speculation may part from PLAIN X times as often as --plain-again does",
    )
    parser.add_argument(
        "--min-prompts",
        type=int,
        metavar="PROMPTS",
        help="distinct prompts with fewer of which nothing passes (default 30)",
    )
    add_report_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.divergence_findings import MIN_PROMPTS, divergence_findings

    check_report(options)
    again = options.plain_again
    findings = divergence_findings(
        read_measurement(options.plain),
        [read_measurement(path) for path in options.speculative],
        plain_again=read_measurement(again) if again else None,
        max_gap=options.max_gap,
        max_hazard_ratio=options.max_hazard_ratio,
        min_prompts=MIN_PROMPTS if options.min_prompts is None else options.min_prompts,
    )
    return report_findings(findings, options)
