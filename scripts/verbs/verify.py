"""`verify`: re-read a quantized draft and compare it with its source."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...quantize.asked import Verifying
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...quantize.verify import Fault, GraftVerification, VerifyReport


@verb(Verifying)
def verify(settings: Verifying) -> "reports.Verification":
    """Check every byte of a quantized folder against the draft that it was made from.

    Example:
        >>> report = dq.verify("OUT", against="DRAFT")
        >>> report.ok, report.faults
        (True, ())

    Returns:
        What was found. A wrong byte is a fault of the report, not an exception.

    Raises:
        CheckpointError: the source is not an unquantized draft, or the folder is not a checkpoint.
        DeclarationError: the folder of another tool declares a quantization that is not supported.
    """
    from ...quantize.verify.verification import verify_as_asked

    return verify_as_asked(settings)


def _show(verification: "reports.Verification", _settings: object) -> None:
    if verification.comparison is not None:
        print_verification(verification.comparison)
    if verification.graft is not None:
        _print_graft(verification.graft)


def _print_graft(report: "GraftVerification") -> None:
    out = stdout()
    if not report.declared:
        out.line(
            "what the target's tool declares is not understood here: it was not compared, for each"
            " linear, with what was declared before"
        )
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": all {report.target_tensors:,} tensors of the target are unchanged,"
            f" {report.same_file:,} of them in files that both folders have in common (links);"
            f" {report.layer_tensors:,} tensors of {', '.join(report.layers)} are"
            f" {'those of the layer' if report.with_layer else 'as recorded (--layer LAYER)'};"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    _print_faults(report.faults)


def _print_faults(faults: Sequence["Fault"]) -> None:
    out = stdout()
    out.line(("WRONG", "bold red"), f": {len(faults)} fault(s)")
    for fault in faults:
        out.line(f"  {fault}")


def print_verification(report: "VerifyReport") -> None:
    """Print the linears with their errors, then the verdict or every fault."""
    out = stdout()
    # Bounds are for folders of other tools: the results of our recipes are known exactly.
    bounded = any(linear.max_error is not None for linear in report.linears)
    numbers = (*(("error / allowed",) if bounded else ()), "relative L2 error")
    rows = table(
        f"Verified: {report.output} against {report.source}, declared"
        f" {report.scheme or 'as not quantized'}",
        "linear",
        *numbers,
    )
    for linear in report.linears:
        error = "-" if linear.max_error is None else f"{linear.max_error:.4f}"
        errors = (error,) if bounded else ()
        rows.row(linear.module, *errors, f"{linear.relative_l2_error:.4f}")
    if report.linears or report.vocabulary is None:
        print_table(rows)
    rules = [linear.found for linear in report.linears if linear.found]
    for rule in dict.fromkeys(rules):
        out.line(f"{rule}: {rules.count(rule)} linear(s)")
    if report.learned_norms:
        most = max(report.learned_norms.values())
        out.line(
            f"{len(report.learned_norms)} norm(s) learned with the quantized values: not equal to"
            f" the source's, but as draftquant.json records them, and no element was changed by a"
            f" factor of more than {most:.4g}"
        )
    if report.dropped:
        names = ", ".join(report.dropped)
        shown = (
            "compared again with the target's, byte for byte"
            if report.dropped_shown
            else "recorded as equal to the target's, not compared again (--target TARGET)"
        )
        out.line(f"{names}: dropped, {shown}")
    if report.head_unshown:
        out.line(
            "lm_head: rows of the target's head, recorded by their digest, not compared again"
            " (--target TARGET)"
        )
    if report.ok and report.vocabulary is not None:
        out.line(
            ("GOOD", "bold green"),
            f": {report.vocabulary}; {report.kept} tensors as the source says ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": {report.kept} tensors equal byte for byte,"
            f" {report.quantized} linears as the recipe demands ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    _print_faults(report.faults)


COMMAND = Command(verify, _show, exit_code=lambda report: 0 if report.ok else 1)
