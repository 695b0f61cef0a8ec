"""`draftquant accept`: prints what each step found, and the worst verdict."""

import argparse
import shlex
from typing import TYPE_CHECKING

from ..api.accept import accept
from ..api.accept_settings import AcceptSettings
from ..console import print_json, print_table, stdout, table
from .gate_report import COLOURS, Places, print_ways_out

if TYPE_CHECKING:
    from ...validate.acceptance.acceptance import Acceptance

VERB = accept
EPILOG = (
    "exit codes: 0 PASS, 1 FAIL, 2 bad input, 3 INCONCLUSIVE or ANOMALOUS, by the worst step; the"
    " same command goes on with what an earlier run left in --out"
)


def run(options: argparse.Namespace) -> int:
    """Accept or not; the exit code is that of the worst verdict."""
    found = accept.run(options.settings)
    if options.json:
        print_json(found.to_mapping())
    else:
        _print(found, _places(options.settings))
    return found.exit_code


def _places(settings: AcceptSettings) -> Places:
    """What commands to copy call BF16 and so on -> what was given here."""
    named = {
        "BF16": settings.draft,
        "QUANT": settings.quantized,
        "TARGET": settings.target,
        "TRACES": settings.traces,
    }
    return {name: shlex.quote(str(place)) for name, place in named.items() if place is not None}


def _print(found: "Acceptance", known: Places) -> None:
    out = stdout()
    rows = table(f"Acceptance of {found.quantized}", "step", "outcome", "what was found")
    for step in found.steps:
        rows.row(step.name, step.outcome, step.said, style=COLOURS.get(step.outcome, ""))
    print_table(rows)
    if found.verdict is not None:
        out.line((found.verdict, f"bold {COLOURS[found.verdict]}"), f": {found.reason}")
        print_ways_out(found.action, known)
    if found.dry_run:
        out.line("nothing was carried out (--dry-run)")
    else:
        out.line((str(found.page), "bold"), ": every step, and the report of the gate")
