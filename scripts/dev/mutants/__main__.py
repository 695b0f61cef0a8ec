"""`./scripts/test --mutants`: which small changes of the product does no everyday test notice?

Those of the lines that changed since the branch left main, of files and folders, or of some lines
drawn from them. tests/equivalents.toml has those that cannot be noticed. Exit code 3: some survive.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path

import pytest

from .. import ROOT
from .changes import Mutant, is_read, mutants_of
from .judging import FORK, KINDS, Judge, Reach, Said, last_words, run_pytest
from .recording import KEPT, ROOMS, Recorder, keep, product

SURVIVED = KINDS[1:3]


def in_drawn_order(mutants: Iterable[Mutant], seed: str) -> list[Mutant]:
    """One of each line, then another one: in an order that the seed and the lines' texts give."""
    drawn: dict[tuple[str, int], list[tuple[str, str, Mutant]]] = defaultdict(list)

    def draw(*what: str) -> str:
        return hashlib.sha256(repr((seed, *what)).encode()).hexdigest()

    for mutant in mutants:
        line = (mutant.path, mutant.old)
        one = (draw(*line), draw(*line, mutant.operator, mutant.new), mutant)
        drawn[mutant.path, mutant.lines.start].append(one)
    ranked = (enumerate(sorted(line, key=itemgetter(0, 1))) for line in drawn.values())
    found = sorted(chain.from_iterable(ranked), key=lambda one: (one[0], one[1][0]))
    return [mutant for _, (*_, mutant) in found]


def changed_lines(root: Path, since: str) -> dict[str, set[int]]:
    """Path -> the lines that are new since a commit, or not committed yet."""
    lines: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in git(root, "diff", "-U0", "--no-color", "--no-ext-diff", since).splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines[path].update(range(first, first + count))
    for path in git(root, "ls-files", "--others", "--exclude-standard", *ROOMS).splitlines():
        lines[path].update(range(1, (root / path).read_bytes().count(b"\n") + 2))
    return lines


def landed(root: Path) -> str:
    """Where this branch left origin/main, else main; for what has landed, the commit before it."""
    bases = (git(root, "merge-base", name, "HEAD") for name in ("origin/main", "main"))
    base = next(filter(None, bases), "")
    if base and (base != git(root, "rev-parse", "HEAD") or git(root, "status", "-s", *ROOMS)):
        return base
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD~1")


def git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it knows no such commit."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def judged(
    root: Path, mutants: Sequence[Mutant], until: float, say: Callable[[Said], None]
) -> None:
    """Say what becomes of each, as soon as it is known; what pytest prints goes to a file."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree, recorded = Path(temporary).resolve() / "tree", Path(temporary, "recorded")
        ignored = shutil.ignore_patterns(".git", ".venv*", "*_cache", "*.egg-info", "build", "dist")
        shutil.copytree(root, tree, symlinks=True, ignore=ignored)
        if not (root / KEPT).is_file():
            print("recording which lines each test runs", file=sys.stderr, flush=True)
            recorded.mkdir()
            recorder = FORK.Process(target=record, args=(tree, recorded))
            recorder.start()
            recorder.join()
            if recorder.exitcode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise RuntimeError(f"the tests could not be recorded: {last_words(tree)}")
            keep(root, recorded)
        reach = Reach(tree, json.loads((root / KEPT).read_text("utf-8")))
        jobs = [reach.job(mutant) for mutant in mutants]
        files = reach.changed | {t.partition("::")[0] for job in jobs for t in job.tests}
        judge = Judge(tree, reach, jobs, until, say)
        if run_pytest(tree, sorted(files), judge) != pytest.ExitCode.OK:
            raise RuntimeError(f"the tests could not be collected: {last_words(tree)}")


def record(tree: Path, recorded: Path) -> None:
    """In a fork: run all tests, and write which lines each of them runs."""
    workers = ["--workers", "2"] * (tree / "tests" / "workers.py").is_file()
    sys.exit(run_pytest(tree, (), Recorder(tree, recorded), *workers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants, and say which survive."""
    parser = argparse.ArgumentParser(prog="scripts/test --mutants", description=__doc__)
    option = parser.add_argument
    option("paths", nargs="*", metavar="PATH", help="files and folders of the product")
    option("--since", metavar="COMMIT", help="only of lines that changed since then")
    option("--count", type=int, metavar="N", help="so many lines, one mutant of each")
    option("--seed", default="1", help="which ones (%(default)s)")
    option(
        "--sample", action="store_true", help="those of tests/mutants.toml; write how many there"
    )
    option("--minutes", type=float, default=math.inf, help="then none is begun any more")
    option("--json", action="store_true", help="what became of each, on stdout")
    option("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root, until = options.root.resolve(), time.monotonic() + 60 * options.minutes
    sample, since = root / "tests" / "mutants.toml", options.since
    if options.sample:
        fixed = tomllib.loads(sample.read_text("utf-8"))
        options.seed, options.count = fixed["seed"], fixed["mutants"]
    elif since is None and not options.paths and options.count is None:
        since = landed(root)
        if not since:
            print("mutants: this clone holds one commit alone, so nothing says what changed")
            print("  fix: fetch more (git fetch --deepen 1), or name files, --since or --count")
            return 0
    if since and not git(root, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        parser.error(f"--since {since}: this clone holds no such commit; fetch it")
    lines = changed_lines(root, since) if since else {}
    below = tuple(f"{path.rstrip('/')}/" for path in options.paths) or ("",)
    mutants = (
        mutant
        for path in [*product(root, ".py"), *product(root, ".toml")]
        if f"{path}/".startswith(below) and (not since or path in lines)
        for mutant in mutants_of(path, (root / path).read_bytes())
        if not since or lines[path].intersection(mutant.lines)
    )
    readable = (
        mutant
        for mutant in in_drawn_order(mutants, options.seed)
        if is_read(mutant.path, mutant.applied((root / mutant.path).read_bytes()))
    )
    drawn = list(islice(readable, options.count))
    listed = equivalents(root)
    left = [mutant for mutant in drawn if (mutant.path, mutant.old, mutant.new) not in listed]
    of_what = f" of lines that changed since {since[:12]}" if since else ""
    alone = f"; {len(drawn) - len(left)} more are listed as equivalent"
    print(f"{len(left)} mutants{of_what}{alone}", file=sys.stderr, flush=True)
    verdicts: list[Said] = []
    with os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err:
        printed = err if options.json else out

        def say(said: Said) -> None:
            verdicts.append(said)
            if said["verdict"] in SURVIVED:
                print(survivor(said), file=printed, flush=True)

        if left:
            judged(root, left, until, say)
        print(summary(verdicts), file=printed)
        if options.json:
            print(json.dumps({"seed": options.seed, "mutants": verdicts}, indent=1), file=out)
    counts = Counter(said["verdict"] for said in verdicts)
    survived = sum(counts[kind] for kind in SURVIVED)
    if options.sample and not counts["left"]:
        text = re.sub(r"(?m)^survived = .*", f"survived = {survived}", sample.read_text("utf-8"))
        sample.write_text(text, encoding="utf-8")
    return 3 if survived else 0


def equivalents(root: Path) -> set[tuple[str, str, str]]:
    """The mutants that change nothing for anybody: path, old, new."""
    rows = tomllib.loads((root / "tests" / "equivalents.toml").read_text("utf-8"))
    return {(row["path"], row["old"], row["new"]) for row in rows.get("equivalent", ())}


def survivor(said: Said) -> str:
    """A survivor for readers: its place, what changes, and who did not notice."""
    tests = ", ".join(said["tests"][:3]) + (", ..." if said["ran"] > 3 else "")
    ran = f"{said['ran']} tests ran it: {tests}" if tests else "no test runs it"
    place = f"{said['path']}:{said['line']}: {said['operator']}"
    return f"{place}\n  - {said['old'][:160]}\n  + {said['new'][:160]}\n  {ran}"


def summary(verdicts: Sequence[Said]) -> str:
    """Counts by room and by operator."""
    lines: list[str] = []
    for title in ("room", "operator") if verdicts else ():
        lines.append(f"{title:30}" + "".join(f"{kind:>12}" for kind in KINDS))
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for said in verdicts:
            counts[said[title]][said["verdict"]] += 1
        for name, count in sorted(counts.items()):
            lines.append(f"{name:30}" + "".join(f"{count[kind]:>12}" for kind in KINDS))
    of_all = Counter(said["verdict"] for said in verdicts)
    survived = sum(of_all[kind] for kind in SURVIVED)
    return "\n".join([*lines, f"{survived} of {len(verdicts) - of_all['left']} mutants survived"])


if __name__ == "__main__":
    sys.exit(main())
