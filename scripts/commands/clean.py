"""`draftquant clean`: remove what killed runs left beside outputs."""

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

from ...quantize.errors import OutputError
from ...quantize.files.stale import Staging, find_staging
from ...recipes.errors import short
from ..console import megabytes, print_json, stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`clean FOLDER [--older-than HOURS]`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="that outputs were written to")
    parser.add_argument(
        "--older-than",
        type=_hours,
        metavar="HOURS",
        help="also what runs on other machines have not touched for so long; without it only what"
        " died here",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    if not options.folder.is_dir():
        raise OutputError(options.folder, "no such folder", fix="give the parent of outputs")
    removed: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    for staging in find_staging(options.folder):
        why = _why_left(staging, options.older_than)
        if why is None:
            removed.append({"folder": staging.path.name, "bytes": staging.nbytes})
            shutil.rmtree(staging.path)
        else:
            left.append({"folder": staging.path.name, "why": why})
    if options.json:
        print_json({"removed": removed, "left": left})
    else:
        _print(removed, left)
    return 0


def _why_left(staging: Staging, older_than: float | None) -> str | None:
    """Why a folder must stay; None = nobody works on it any more."""
    if staging.is_here:
        return "its run is alive" if staging.is_live else None
    hours = staging.idle_hours()
    if older_than is None or hours <= older_than:
        return f"of another machine or container, last changed {hours:.1f} hours ago"
    return None


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not hours >= 0:
        raise argparse.ArgumentTypeError(f"expected hours, such as 24, got {short(text)}")
    return hours


def _print(removed: list[dict[str, Any]], left: list[dict[str, Any]]) -> None:
    out = stdout()
    for one in removed:
        out.line(f"removed {one['folder']} ({one['bytes']:,} bytes)")
    for one in left:
        out.line(f"left {one['folder']}: {one['why']}")
    total = sum(one["bytes"] for one in removed)
    out.line(f"{len(removed)} removed, {megabytes(total)}; {len(left)} left")
