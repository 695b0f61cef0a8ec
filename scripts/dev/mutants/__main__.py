"""`./scripts/test --mutants`: which small changes of the product does nothing notice every day?

Those of the lines that changed since the branch left main, of files and folders, or of some lines
drawn from them. tests/equivalents.toml has those that cannot be noticed. Exit code 3: some survive.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from .changes import Mutant, is_read, mutants_of
from .judging import Trial, judge
from .recording import KEPT, ROOMS, product


def drawn(mutants: Iterable[Mutant], seed: str) -> list[Mutant]:
    """One of each line, then another one: in an order that the seed and the lines' texts give."""

    def draw(*what: str) -> str:
        return hashlib.sha256(repr((seed, *what)).encode()).hexdigest()

    turns: Counter[tuple[str, int]] = Counter()
    found: list[tuple[int, str, Mutant]] = []
    for mutant in sorted(mutants, key=lambda m: draw(m.path, m.old, m.operator, m.new)):
        turns[mutant.path, mutant.lines.start] += 1
        turn = turns[mutant.path, mutant.lines.start]
        found.append((turn, draw(mutant.path, mutant.old), mutant))
    return [mutant for *_, mutant in sorted(found, key=itemgetter(0, 1))]


def changed_lines(since: str) -> dict[str, set[int]]:
    """Path -> the lines that are new since a commit, or not committed yet."""
    lines: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in git("diff", "-U0", "--no-color", "--no-ext-diff", since).splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines[path] |= {int(found[1]) + n for n in range(int(found[2] or 1))}
    for path in git("ls-files", "--others", "--exclude-standard", *ROOMS).splitlines():
        lines[path] = {*range(1, Path(path).read_bytes().count(b"\n") + 2)}
    return lines


def landed() -> str:
    """Where this branch left origin/main, else main; for what has landed, the commit before it."""
    bases = (git("merge-base", name, "HEAD") for name in ("origin/main", "main"))
    base = next(filter(None, bases), "")
    changed = base != git("rev-parse", "HEAD") or git("status", "-s", *ROOMS)
    return base if base and changed else git("rev-parse", "--verify", "--quiet", "HEAD~1")


def git(*arguments: str) -> str:
    """What git prints; nothing where it knows no such commit."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants of the tree in the working directory, and say which survive."""
    root, began = Path.cwd(), time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with more waits for them for ever
    parser = argparse.ArgumentParser(prog="scripts/test --mutants", description=__doc__)
    option = parser.add_argument
    option("paths", nargs="*", metavar="PATH", help="files and folders of the product")
    option("--since", metavar="COMMIT", help="only of lines that changed since then")
    option("--count", type=int, metavar="N", help="so many lines, one mutant of each")
    option("--seed", default="1", help="which ones (%(default)s)")
    option("--minutes", type=float, default=math.inf, help="then none is begun any more")
    option("--json", action="store_true", help="what became of each, on stdout")
    options = parser.parse_args(arguments)
    since, below = options.since, tuple(f"{path.rstrip('/')}/" for path in options.paths)
    if not since and not below and options.count is None and not (since := landed()):
        print("mutants: this clone holds one commit alone, so nothing says what changed")
        print("  fix: fetch more (git fetch --deepen 1), or name files, --since or --count")
        return 0
    if since and not git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        parser.error(f"--since {since}: this clone holds no such commit; fetch it")
    sources = {**product(root, ".py"), **product(root, ".toml")}
    lines = changed_lines(since) if since else {}
    mutants = (
        mutant
        for path, source in sources.items()
        if f"{path}/".startswith(below or "") and (not since or path in lines)
        for mutant in mutants_of(path, source)
        if not since or lines[path].intersection(mutant.lines)
    )
    ordered = drawn(mutants, options.seed)
    read = (m for m in ordered if is_read(m.path, m.applied(sources[m.path])))
    chosen = [*islice(read, options.count)]
    rows = tomllib.loads(Path("tests", "equivalents.toml").read_text("utf-8"))["equivalent"]
    listed = {(row["path"], row["old"], row["new"]) for row in rows}
    left = [mutant for mutant in chosen if (mutant.path, mutant.old, mutant.new) not in listed]
    of_what = f" of lines that changed since {since[:12]}" if since else ""
    tell = functools.partial(print, file=sys.stderr, flush=True)
    tell(f"{len(left)} mutants{of_what}; {len(chosen) - len(left)} more are listed as equivalent")
    if left and not (root / KEPT).is_file():
        tell("recording which lines each test runs")
        command = [sys.executable, "-m", "pytest", "-q", "-p", f"{__package__}.recording"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    verdicts: list[dict[str, Any]] = []
    with os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err:
        printed = err if options.json else out
        for one in judge(root, left, began + 60 * options.minutes) if left else ():
            verdicts.append(said := row(one))
            if one.verdict in ("survived", "not covered"):
                place = f"{said['path']}:{said['line']}: {said['operator']}"
                ran = ", ".join(one.tests[:3]) if one.covered else "no test"
                changed = f"  - {said['old'][:160]}\n  + {said['new'][:160]}"
                print(f"{place}\n{changed}\n  run by {ran}", file=printed, flush=True)
        for title in ("room", "operator"):
            counted = Counter((said[title], said["verdict"]) for said in verdicts)
            for (name, kind), count in sorted(counted.items()):
                print(f"{name:30} {kind:12} {count:4}", file=printed)
        kinds = Counter(said["verdict"] for said in verdicts)
        survived = kinds["survived"] + kinds["not covered"]
        print(f"{survived} of {len(verdicts) - kinds['left']} mutants survived", file=printed)
        if options.json:
            print(json.dumps({"seed": options.seed, "mutants": verdicts}, indent=1), file=out)
    return 3 if survived else 0


def row(one: Trial) -> dict[str, Any]:
    """What became of a mutant, as JSON has it."""
    said = {name: getattr(one.mutant, name) for name in ("path", "operator", "old", "new")}
    said |= {"line": one.mutant.lines.start, "room": str(Path(one.mutant.path).parent)}
    return said | {"verdict": one.verdict, "by": one.by, "tests": one.tests}


if __name__ == "__main__":
    sys.exit(main())
