"""`draftquant traces merge`: several folders of one target joined."""

import argparse
from pathlib import Path

from ..console import print_json, stdout
from .traces_written import print_written, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`traces merge A B ... --out C`."""
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACES", help="trace folders, which stay"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.traces.sets import merge_traces
    from ...calibration.traces.trace_folder import TraceFolder

    report = merge_traces([TraceFolder.open(folder) for folder in options.traces], options.out)
    if options.json:
        absent = [str(folder) for folder in report.without_tables]
        changed = {"renamed": dict(report.renamed), "without_tables": absent}
        print_json(written(report.traces) | changed)
        return 0
    print_written(report.traces)
    if report.renamed:
        old, new = next(iter(report.renamed.items()))
        stdout().line(f"{len(report.renamed)} ids were taken and got a new name: {old} is {new}")
    if report.without_tables:
        named = ", ".join(map(str, report.without_tables))
        stdout().line(f"no tables are carried, because {named} carries none")
    return 0
