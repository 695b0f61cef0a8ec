"""`draftquant shards`: a run divided into parts that any machine computes, and joined."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipes.errors import DraftQuantError
from ..api.division import dividing
from ..api.shards import shards_merge, shards_plan, shards_run
from ..console import print_document, print_error, print_json, stdout
from ..parsers import COMMON
from .verbs import Below, Verbs, run_verb

if TYPE_CHECKING:
    from ..shards.shard_folder import ShardFolder


def run(options: argparse.Namespace) -> int:
    """Run the verb."""
    return run_verb(options, VERBS)


def _plan(options: argparse.Namespace) -> int:
    plan = shards_plan.run(options.settings)
    if options.json:
        said = {
            "folder": str(plan.folder),
            "commands": list(map(list, plan.commands)),
            "shards": list(map(dict, plan.shards)),
        }
        print_json(said if plan.script is None else said | {"script": plan.script})
        return 0
    if plan.script is not None:
        print_document(plan.script)
        return 0
    stdout().line(f"{plan.folder}: {len(plan.shards)} shards")
    for number, parts in enumerate(plan.shards):
        named = ", ".join(f"{address[:12]} ({count})" for address, count in parts.items())
        stdout().line(f"  {number}: {named}")
    return 0


def _run(options: argparse.Namespace) -> int:
    found = shards_run.run(options.settings)
    if options.json:
        computed, present = list(found.computed), list(found.present)
        print_json({"folder": str(found.folder), "computed": computed, "present": present})
        return 0
    stdout().line(
        f"{found.folder}: {len(found.computed)} shards computed, {len(found.present)} had a result"
    )
    return 0


def _merge(options: argparse.Namespace) -> int:
    """Print what the commands print; the exit code is that of the command, of several the worst."""
    from ..shards.shard_folder import ShardFolder

    folder = ShardFolder.open(Path(options.settings.folder))
    for run in folder.runs:
        folder.check_present(run)
    if len(folder.commands) == 1:
        return _merge_one(folder, 0, options)
    codes = set()
    for run, command in enumerate(folder.commands):
        if not options.json:
            stdout().line(f"draftquant {shlex.join(command)}")
        try:
            codes.add(_merge_one(folder, run, options))
        except DraftQuantError as exc:  # the others have results of their own
            print_error(exc, as_json=options.json)
            codes.add(2)
    return next(code for code in (2, 1, 3, 0) if code in codes)


def _merge_one(folder: "ShardFolder", run: int, options: argparse.Namespace) -> int:
    from ..cli import run_line
    from ..shards.divisions import Merging

    common = argparse.Namespace(**{name: getattr(options, name) for name in COMMON})
    with dividing(Merging(folder, run)):
        return run_line(folder.commands[run], common)


VERBS: Verbs = {
    "plan": Below(shards_plan, _plan, "divide the prompts of commands into shards"),
    "run": Below(shards_run, _run, "compute shards on this machine"),
    "merge": Below(
        shards_merge, _merge, "join the results, as if one machine had run the commands"
    ),
}
