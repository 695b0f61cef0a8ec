"""`draftquant traces split`: a folder cut in two that have no prompt in common."""

import argparse
from pathlib import Path

from ..console import print_json, print_table, stdout, table
from .common import share
from .traces_written import written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`traces split T --out A B --fraction F | --count N | --category C...`."""
    parser.add_argument("traces", type=Path, metavar="TRACES", help="trace folder, which stays")
    parser.add_argument(
        "--out",
        dest="outs",
        required=True,
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="folders to create, for example calibration and gate",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--fraction", type=share, metavar="SHARE", help="share of the prompts in A")
    size.add_argument("--count", type=int, metavar="PROMPTS", help="prompts in A")
    size.add_argument(
        "--category", nargs="+", default=(), metavar="CATEGORY", help="the categories of A, whole"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="SEED",
        help="equal seeds give equal splits (default 0)",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.errors import TraceError
    from ...calibration.traces.sets import split_traces
    from ...calibration.traces.trace_folder import TraceFolder

    traces = TraceFolder.open(options.traces)
    if options.fraction is not None and not 0 < options.fraction < 1:
        raise TraceError("--fraction", f"expected a share in (0, 1), got {options.fraction}",
                         fix="give the share of the prompts in the first folder")  # fmt: skip
    count = options.count if options.fraction is None else round(options.fraction * len(traces))
    report = split_traces(
        traces, *options.outs, count=count, categories=options.category, seed=options.seed
    )
    if options.json:
        print_json(
            {
                "first": written(report.first),
                "second": written(report.second),
                "by_category": {name: list(counts) for name, counts in report.by_category.items()},
                "kept_together": report.num_kept_together,
            }
        )
        return 0
    names = [str(out) for out in options.outs]
    found = table(f"{options.traces}, {len(traces)} prompts", "category", *names, right=(*names,))
    for category, (first, second) in report.by_category.items():
        found.row(category, str(first), str(second))
    found.row("sum", str(len(report.first)), str(len(report.second)), style="bold")
    print_table(found)
    if report.num_kept_together:
        stdout().line(
            f"{report.num_kept_together} prompts stand where another one does: copies, near"
            " duplicates, and turns of one conversation are kept together"
        )
    return 0
