"""`draftquant push`: a quantized draft onto the Hub."""

import argparse
import dataclasses
import sys
from pathlib import Path

from ..api.loading import to_mapping, verdict_lines
from ..api.push import PushReport, push
from ..console import OnTerminal, megabytes, print_json, print_table, stderr, stdout, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`push O REPO --against DRAFT`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that 'quantize' wrote")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the Hub")
    parser.add_argument("--against", metavar="DRAFT", help="its source: every byte is compared")
    parser.add_argument(
        "--unverified", action="store_true", help="upload without a source to compare with"
    )
    parser.add_argument(
        "--target", type=Path, metavar="TARGET", help="target folder, see 'verify --target'"
    )
    parser.add_argument("--public", action="store_true", help="everybody may see it")
    parser.add_argument(
        "--revision", metavar="BRANCH", help="branch, made if need be (default main)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace files of the same name that have other contents, in a new commit",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check all of it here; print files and bytes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    if not options.dry_run and not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # a log wants no bars
    report = push(
        options.folder,
        options.repository,
        against=options.against,
        unverified=options.unverified,
        target=options.target,
        public=options.public,
        revision=options.revision,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        watch=OnTerminal(),
    )
    if not any(one.verdict == "LOADS" for one in report.engines):
        stderr().line("warning: no engine without a plugin is known to load this folder")
    if options.json:
        own = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
        done = None if report.upload is None else dataclasses.asdict(report.upload)
        engines = to_mapping(report.engines)
        print_json({**own, "bytes": report.nbytes, "engines": engines, "upload": done})
    else:
        _print(report)
    return 0


def _print(report: PushReport) -> None:
    out = stdout()
    who = "private" if report.private else "public"
    if report.upload is None:
        found = table(f"Would be uploaded to {report.repository} ({who})", "file", "bytes",
                      right=("bytes",))  # fmt: skip
        for file, nbytes in sorted(report.files.items()):
            found.row(file, f"{nbytes:,}")
        print_table(found)
    for line in verdict_lines(report.engines):
        out.line(line)
    what = f"{len(report.files)} files, {megabytes(report.nbytes)}"
    checked = "verified" if report.verified else "not verified"
    if report.upload is None:
        out.line((report.repository, "bold"), f": {what}, {checked}; nothing was sent (--dry-run)")
        return
    sent = len(report.upload.sent)
    out.line(
        (report.upload.url, "bold"),
        f" ({who}): {what}, {checked}, {sent} sent, all compared; commit"
        f" {report.upload.commit[:12]}",
    )
