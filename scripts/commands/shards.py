"""`draftquant shards`: a run divided into parts that any machine computes, and joined."""

import argparse
from pathlib import Path

from ..api.division import dividing
from ..api.shards import shards_merge, shards_plan, shards_run
from ..console import print_document, print_json, stdout
from ..parsers import COMMON
from .verbs import Below, Verbs, run_verb


def run(options: argparse.Namespace) -> int:
    """Run the verb."""
    return run_verb(options, VERBS)


def _plan(options: argparse.Namespace) -> int:
    plan = shards_plan.run(options.settings)
    if options.json:
        folder, command = str(plan.folder), list(plan.command)
        said = {"folder": folder, "command": command, "shards": dict(plan.shards)}
        print_json(said if plan.script is None else said | {"script": plan.script})
        return 0
    if plan.script is not None:
        print_document(plan.script)
        return 0
    prompts = sum(plan.shards.values())
    stdout().line(f"{plan.folder}: {len(plan.shards)} shards of {prompts} prompts")
    for i, (address, count) in enumerate(plan.shards.items()):
        stdout().line(f"  {i}: {address[:12]}, {count} prompts")
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
    """Print what the command prints, and end with its exit code."""
    from ..cli import run_line
    from ..shards.divisions import Merging
    from ..shards.shard_folder import ShardFolder

    folder = ShardFolder.open(Path(options.settings.folder))
    folder.check_whole()
    common = argparse.Namespace(**{name: getattr(options, name) for name in COMMON})
    with dividing(Merging(folder)):
        return run_line(folder.command, common)


VERBS: Verbs = {
    "plan": Below(shards_plan, _plan, "divide the prompts of a command into shards"),
    "run": Below(shards_run, _run, "compute shards on this machine"),
    "merge": Below(shards_merge, _merge, "join the results, as if one machine had run the command"),
}
