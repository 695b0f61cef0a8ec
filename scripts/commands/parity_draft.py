"""`draftquant parity draft`: proposals of a quantized draft against those of BF16."""

import argparse
from typing import TYPE_CHECKING

from ..api.parity_draft import parity_draft
from ..console import print_table, table
from .parity_report import show_findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...validate.parity.finding import Finding

VERB = parity_draft


def run(options: argparse.Namespace) -> int:
    """Print figures by step and category, then the findings; the exit code is that of the worst."""
    found = parity_draft.run(options.settings)
    if not options.json:
        _print_parts(found.findings)
    return show_findings(found, as_json=options.json)


def _print_parts(findings: "Sequence[Finding]") -> None:
    """By draft step and by category."""
    figures = [one.what for one in findings]
    found = table("By step and category", "of", *figures, right=(*figures,))
    parts = [(key, row[key]) for key in ("step", "category") for row in findings[0].details
             if key in row]  # fmt: skip
    for key, part in parts:
        cells = []
        for one in findings:
            own = [row["estimate"] for row in one.details if row.get(key) == part]
            cells.append(f"{own[0]:.5f}" if own else "")
        found.row(f"{key} {part}", *cells)
    print_table(found)
