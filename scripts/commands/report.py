"""`draftquant report`: the gate's JSON as a page, as Markdown, as JUnit."""

import argparse
from pathlib import Path

from ..console import print_document, print_json, stderr
from .report_outputs import add_page_arguments, check_pages, wants_pages, write_pages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`report G.json --html F --markdown F --junit F`."""
    parser.epilog = "exit codes: 0 whatever the verdict is, 2 bad input"
    parser.add_argument("gate", type=Path, metavar="G.json", help="what 'gate --report' wrote")
    add_page_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print verdict and files as JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`; without a file it prints Markdown."""
    from ...validate.report.document import read_report
    from ...validate.report.markdown_report import markdown

    check_pages(options)
    document = read_report(options.gate)
    written = [str(path) for path in write_pages(options, document)]
    if options.json:
        judgement = document.judgement
        print_json({"verdict": judgement.verdict, "reason": judgement.reason, "written": written})
    elif not wants_pages(options):
        print_document(markdown(document))
    for path in written:
        stderr().line((path, "bold"), f": {document.judgement.verdict}")
    return 0
