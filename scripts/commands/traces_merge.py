"""`draftquant traces merge`: several folders of one target joined."""

import argparse

from ..api.traces import traces_merge
from ..console import print_json, stdout
from .traces_written import print_written, written

VERB = traces_merge


def run(options: argparse.Namespace) -> int:
    """Merge, and print what was written."""
    report = traces_merge.run(options.settings)
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
