"""`draftquant record`: what a target does on prompts, for calibration and replay."""

import argparse
from typing import TYPE_CHECKING

from ..api.record import record
from ..console import megabytes, print_document, print_json, stdout
from .traces_info import print_written, written

if TYPE_CHECKING:
    from ..api.reports import TraceFolder

VERB = record


def run(options: argparse.Namespace) -> int:
    """Record, and print what was written; or print the command of a server."""
    done = record.run(options.settings)
    if isinstance(done, str):
        if options.json:
            print_json({"command": done})
        else:
            print_document(done)
    elif options.json:
        print_json(written(done))
    else:
        _print_traces(done)
    return 0


def _print_traces(traces: "TraceFolder") -> None:
    print_written(traces)
    if tables := traces.manifest.tables:
        head = f"{traces.manifest.target.vocab_size:,} x {tables.width:,}"
        stdout().line(
            f"{tables.file}: embedding {tables.num_token_ids:,} x {tables.width:,}, head {head},"
            f" {megabytes(tables.nbytes)}"
        )
