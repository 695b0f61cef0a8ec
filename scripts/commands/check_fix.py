"""`draftquant check --fix`: what was wrong, and what was written into the repaired copy."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quantize.engines.repairs import RepairPlan, RepairReport, plan_repairs, repair_draft
from ...quantize.errors import CheckpointError
from ...quantize.files.hub import DraftSource, resolve_draft
from ...quantize.files.staging import check_output
from ..console import print_table, stdout, table

_SHOWN_FAULTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A plan, and what was written; `report` is None where there was nothing to repair."""

    plan: RepairPlan
    report: RepairReport | None

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        verification = self.report.verification if self.report else None
        return {
            "out": str(self.report.out) if self.report else None,
            "repairs": [dataclasses.asdict(repair) for repair in self.plan.repairs],
            "notes": list(self.plan.notes),
            "verification": verification.to_mapping() if verification else None,
        }


def add_fix_arguments(parser: argparse.ArgumentParser) -> None:
    """`--fix --out O [--against BF16]`."""
    parser.add_argument(
        "--fix", action="store_true", help="write a copy with its config repaired; needs --out"
    )
    parser.add_argument("--out", type=Path, metavar="O", help="folder to create, with --fix")
    parser.add_argument(
        "--against",
        metavar="BF16",
        help="the draft that DRAFT was made from: proves INT4 pack orders and the result",
    )


def check_fix_arguments(options: argparse.Namespace) -> None:
    """`--out` is given exactly with `--fix`, `--against` with it only.

    Raises:
        CheckpointError: they do not go together.
        OutputError: the output exists or cannot be written.
    """
    if options.fix and options.out is None:
        raise CheckpointError(
            "--fix",
            "writes a new folder, never into DRAFT, and no folder is given",
            fix="add --out O",
        )
    if not options.fix and (options.out or options.against):
        given = "--out" if options.out else "--against"
        raise CheckpointError(given, "without --fix, nothing is written", fix="add --fix")
    if options.fix:
        check_output(options.out)


def fix(source: DraftSource, options: argparse.Namespace) -> Fixed:
    """Plan, and write where there is something to repair."""
    against = resolve_draft(options.against).folder if options.against else None
    plan = plan_repairs(
        source.folder,
        engine=options.engine,
        version=options.version,
        target_layers=options.target_layers,
        against=against,
    )
    if not plan.repairs:
        return Fixed(plan=plan, report=None)
    report = repair_draft(plan, options.out, source=source, argv=options.argv)
    return Fixed(plan=plan, report=report)


def print_fix(fixed: Fixed) -> None:
    """Print the repairs, what was left, and where the copy is."""
    out, plan, report = stdout(), fixed.plan, fixed.report
    if plan.repairs:
        found = table(f"Repaired: {plan.source.folder}", "repair", "what was wrong", "written")
        for repair in plan.repairs:
            found.row(repair.name, repair.wrong, repair.written)
        print_table(found)
    for note in plan.notes:
        out.line(f"left: {note}")
    if report is None:
        out.line("nothing to repair in its config: no folder was written")
        return
    out.line((str(report.out), "bold"), f": every tensor has the bytes of {plan.source.folder}")
    verified = report.verification
    if verified is None:
        return
    if verified.ok:
        out.line(("GOOD", "bold green"), f" against {verified.source}: every byte is accounted for")
        return
    out.line(
        ("WRONG", "bold red"),
        f" against {verified.source}: {len(verified.faults)} fault(s) are left",
    )
    for fault in verified.faults[:_SHOWN_FAULTS]:
        out.line(f"  {fault}")
    if len(verified.faults) > _SHOWN_FAULTS:
        out.line(f"  and {len(verified.faults) - _SHOWN_FAULTS} more: `draftquant verify`")
