"""`draftquant report`: the gate's JSON as a page, as Markdown, as JUnit."""

import argparse

from ..api.report import report
from ..console import print_document, print_json, stderr

VERB = report
EPILOG = "exit codes: 0 whatever the verdict is, 2 bad input"


def run(options: argparse.Namespace) -> int:
    """Write the files; without one print Markdown."""
    from ...validate.report.markdown_report import markdown

    found = report.run(options.settings)
    judgement, written = found.document.judgement, [str(path) for path in found.written]
    if options.json:
        print_json({"verdict": judgement.verdict, "reason": judgement.reason, "written": written})
    elif not options.settings.wants_pages:
        print_document(markdown(found.document))
    for path in written:
        stderr().line((path, "bold"), f": {judgement.verdict}")
    return 0
