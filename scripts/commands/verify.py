"""`draftquant verify`: re-read a quantized draft and compare it with its source."""

import argparse
import dataclasses
from pathlib import Path

from ...quantize.files.signature import SignatureReport
from ...quantize.verify.folder import VerifyReport
from ..api.signature import check_signature, sign
from ..api.verify import verify
from ..console import OnTerminal, print_json, print_table, stdout, table
from ..examples import EXAMPLES
from ..parsers import UsageError
from .common import add_subtree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`verify O --against DRAFT [--foreign] [--target M]`, `verify O --verify-signature KEY`."""
    parser.add_argument("output", metavar="QUANT", help="quantized draft folder or Hub id")
    parser.add_argument("--against", metavar="DRAFT", help="its BF16 source")
    add_subtree(parser)
    parser.add_argument(
        "--foreign",
        action="store_true",
        help="another tool made QUANT: no draftquant.json is expected, and codes and scales may"
        " have the roundings of such tools",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="TARGET",
        help="target folder: compare its tables again with those that QUANT leaves to it",
    )

    parser.add_argument(
        "--sign",
        type=Path,
        metavar="KEY",
        help="private key (PEM): if every byte is right, write the signature model.sig into QUANT",
    )
    parser.add_argument(
        "--verify-signature",
        type=Path,
        metavar="KEY",
        help="public key (PEM): whether its holder signed QUANT as it is; needs no --against",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    _check(options)
    report = signature = signed = None
    if options.verify_signature:
        signature = check_signature(options.output, options.verify_signature)
    if options.against:
        report = verify(
            options.output,
            options.against,
            subtree=options.subtree,
            foreign=options.foreign,
            target=options.target,
            watch=OnTerminal(),
        )
    if options.sign and report is not None and report.ok:
        signed = sign(options.output, options.sign)
    ok = all(each.ok for each in (report, signature) if each is not None)
    if options.json:
        own = {"ok": ok} if report is None else {**report.to_mapping(), "ok": ok}
        found = {"signature": signature, "signed": signed}
        print_json(own | {key: each and dataclasses.asdict(each) for key, each in found.items()})
        return 0 if ok else 1
    if signature is not None:
        _print_signature(signature)
    if report is not None:
        print_verification(report)
    if signed is not None:
        what = f": {len(signed.sha256)} files, by the key whose sha256 is {signed.key_sha256}"
        stdout().line(("SIGNED", "bold green"), what)
    return 0 if ok else 1


def _check(options: argparse.Namespace) -> None:
    """There is something to verify, and what is signed was verified.

    Raises:
        UsageError: there is not, or it was not.
    """
    if options.against is None and options.sign:
        raise UsageError("--sign", "missing: --against; only what verifies is signed",
                         fix="add --against DRAFT, its BF16 source")  # fmt: skip
    if options.against is None and not options.verify_signature:
        fix = f"{EXAMPLES['verify'][0]}; or --verify-signature KEY for who published it"
        raise UsageError("draftquant verify", "missing: --against", fix=fix)
    if options.sign and options.verify_signature:
        raise UsageError("--sign", "not allowed with argument --verify-signature",
                         fix="verify it with the public key after it is signed")  # fmt: skip


def _print_signature(report: SignatureReport) -> None:
    out = stdout()
    if report.ok:
        out.line(
            ("SIGNED", "bold green"),
            f": {len(report.files)} files are as the holder of the key signed them, and there are"
            f" no others; sha256 of the key {report.key_sha256}",
        )
        return
    out.line(("WRONG", "bold red"), f": {len(report.faults)} fault(s) of the signature")
    for fault in report.faults:
        out.line(f"  {fault}")


def print_verification(report: VerifyReport) -> None:
    """Print the linears with their errors, then the verdict or every fault."""
    out = stdout()
    # Bounds are for folders of other tools: what a recipe of this package gives is known exactly.
    bounded = any(linear.max_error is not None for linear in report.linears)
    numbers = (*(("error / allowed",) if bounded else ()), "relative L2 error")
    found = table(
        f"Verified: {report.output} against {report.source}, declared"
        f" {report.scheme or 'as not quantized'}",
        "linear",
        *numbers,
        right=numbers,
    )
    for linear in report.linears:
        error = "-" if linear.max_error is None else f"{linear.max_error:.4f}"
        errors = (error,) if bounded else ()
        found.row(linear.module, *errors, f"{linear.relative_l2_error:.4f}")
    print_table(found)
    rules = [linear.found for linear in report.linears if linear.found]
    for rule in dict.fromkeys(rules):
        out.line(f"{rule}: {rules.count(rule)} linear(s)")
    if report.retuned:
        out.line(
            ("RETUNED", "bold magenta"),
            ": its target taught it, so that the source does not say what its linears must be. That"
            " training gave these is not shown: only that they are those whose sha256"
            " draftquant.json records under its seal",
        )
    if report.dropped:
        names = ", ".join(report.dropped)
        shown = (
            "compared with the target's again, byte for byte"
            if report.dropped_shown
            else "recorded as equal to the target's, not compared again (--target TARGET)"
        )
        out.line(f"{names}: dropped, {shown}")
    if report.ok:
        out.line(
            ("GOOD", "bold green"),
            f": {report.kept} tensors equal byte for byte,"
            f" {report.quantized} linears as demanded ({report.rule}),"
            f" {report.bytes_compared:,} bytes compared",
        )
        return
    out.line(("WRONG", "bold red"), f": {len(report.faults)} fault(s)")
    for fault in report.faults:
        out.line(f"  {fault}")
