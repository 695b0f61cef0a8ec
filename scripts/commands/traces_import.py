"""`draftquant traces import`: hidden states that a trainer or vLLM dumped become traces."""

import argparse
from typing import TYPE_CHECKING, Any

from ..api.traces import traces_import
from ..console import print_json, stdout
from .traces_written import print_written, written

if TYPE_CHECKING:
    from ..api.reports import ImportReport

VERB = traces_import


def run(options: argparse.Namespace) -> int:
    """Import, and print what was found."""
    report = traces_import.run(options.settings)
    if options.json:
        print_json(_mapping(report))
    else:
        _print(report)
    return 0


def _print(report: "ImportReport") -> None:
    print_written(report.traces, f" of {report.num_samples} texts")
    for sentence in report.layout.sentences():
        stdout().line(f"  {sentence}")
    if report.num_off_policy:
        stdout().line(
            f"  {report.num_off_policy} answers left out: the target would not have given them"
        )
    if report.num_without_answer:
        stdout().line(f"  {report.num_without_answer} texts without an answer")


def _mapping(report: "ImportReport") -> dict[str, Any]:
    return written(report.traces) | {
        "texts": report.num_samples,
        "findings": list(report.layout.sentences()),
        "left_out_off_policy": report.num_off_policy,
        "without_answer": report.num_without_answer,
    }
