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
from ...quantize.stored.declarations import raw_declaration
from ...quantize.verify.folder import VerifyReport, verify
from ..console import print_table, stdout, table
from .verify import print_verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A plan, and what was written.

    Attributes:
        report: None where there was nothing to repair.
        verification: of the repaired folder, or of DRAFT where nothing was written, against the
            draft that it was made from; None without one, and where there are no codes to verify.
    """

    plan: RepairPlan
    report: RepairReport | None
    verification: VerifyReport | None

    @property
    def is_refuted(self) -> bool:
        """True if `verify` says no."""
        return self.verification is not None and not self.verification.ok

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "out": str(self.report.out) if self.report else None,
            "repairs": [dataclasses.asdict(repair) for repair in self.plan.repairs],
            "notes": list(self.plan.notes),
            "verification": self.verification.to_mapping() if self.verification else None,
        }


def add_fix_arguments(parser: argparse.ArgumentParser) -> None:
    """`--fix --out O [--against BF16]`."""
    parser.add_argument(
        "--fix", action="store_true", help="write a copy with its config repaired; needs --out"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to create, with --fix")
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
            fix="add --out FOLDER",
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
    if plan.repairs:
        report = repair_draft(plan, options.out, source=source, argv=options.argv)
        return Fixed(plan=plan, report=report, verification=report.verification)
    if against is None or raw_declaration(plan.source) is None:
        return Fixed(plan=plan, report=None, verification=None)
    verification = verify(source.folder, against, foreign=True)
    return Fixed(plan=plan, report=None, verification=verification)


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
    else:
        out.line((str(report.out), "bold"), f": every tensor has the bytes of {plan.source.folder}")
    if fixed.verification is not None:
        print_verification(fixed.verification)
