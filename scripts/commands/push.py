"""`draftquant push`: a quantized draft onto the Hub."""

import argparse
import dataclasses
import sys

from ..api.engine_verdicts import to_mapping, verdict_lines
from ..api.push import PushReport, push
from ..console import megabytes, print_json, print_table, stdout, table

VERB = push


def run(options: argparse.Namespace) -> int:
    """Upload, and print what was sent or would be."""
    if not options.settings.dry_run and not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # a log wants no bars
    report = push.run(options.settings)
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
