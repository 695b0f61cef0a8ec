"""`draftquant traces split`: a folder cut in two that have no prompt in common."""

import argparse

from ..api.traces import traces_split
from ..console import print_json, print_table, stdout, table
from .traces_written import written

VERB = traces_split


def run(options: argparse.Namespace) -> int:
    """Split, and print what is where."""
    settings = options.settings
    report = traces_split.run(settings)
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
    names = [str(out) for out in settings.outs]
    title = f"{settings.traces}, {len(report.first) + len(report.second)} prompts"
    found = table(title, "category", *names, right=(*names,))
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
