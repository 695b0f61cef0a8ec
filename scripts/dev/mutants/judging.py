"""Mutants are judged by the tests that run their lines, the nearest first; then by mypy.

Each is put into a copy of the tree. A fork of a process that has collected all tests imports ours
anew from there, and runs them.
"""

import ast
import contextlib
import gc
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest

from .changes import Mutant
from .recording import KEPT, entry, known

FIRST_TESTS, JUDGING_SECONDS, MOST_SECONDS = 6, 20.0, 90
"""So many of the nearest tests run first; CPU seconds of all that judge, and the most of a fork."""
SAID = ".out"
"""Beside a copy of the tree: what pytest prints there."""
FORK = multiprocessing.get_context("fork")


class Record:
    """Which test runs which line, as it was recorded of this tree or of an earlier one."""

    def __init__(self, root: Path, collected: Sequence[str]) -> None:
        with (root / KEPT).open(encoding="utf-8") as lines:
            known_lines: list[str] = json.loads(next(lines))
            kept = [json.loads(line) for line in lines]
        runs: dict[str, list[int]] = {test: numbers for test, numbers, _ in kept}
        self._seconds = defaultdict(lambda: 0.1, {test: spent for test, _, spent in kept})
        cases: Counter[str] = Counter()
        self._distance: dict[str, int] = {}
        for test in sorted(runs.keys() & {*collected}, key=lambda test: len(runs[test])):
            cases[test.partition("[")[0]] += 1
            self._distance[test] = len(runs[test]) * cases[test.partition("[")[0]]
        self._root, self._running = root, defaultdict[str, list[str]](list)
        self._own = defaultdict[str, list[str]](list)
        self._new = [test for test in collected if test not in runs]
        for test in sorted(self._distance, key=self._distance.__getitem__):
            file, _, name = test.partition("[")[0].partition("::")
            whole, functions = functions_of(root / file)
            self._own[functions.get(name, "")].append(test)
            for line in [whole, *(known_lines[number] for number in runs[test])]:
                self._running[line].append(test)

    def tests(self, mutant: Mutant) -> tuple[list[str], bool]:
        """The nearest tests, those that run fewest lines; and whether they run this one.

        Of what runs at import, or what no test runs, those that have or run most words of it, first
        in their own text.
        """
        lines = (self._root / mutant.path).read_text("utf-8").split("\n")
        ran = self._running.get(known(mutant.path, lines, mutant.place.statement))
        if ran and not mutant.place.imported:
            return self._several(ran), True
        near: Counter[str] = Counter()
        words = re.findall(r"[\w.-]{4,}", f"{mutant.path} {mutant.old}")
        for line in self._entries(mutant, lines):
            near.update(dict.fromkeys(self._running[line], 10 / len(self._running[line])))
        for word, texts in product({*mutant.place.names, *words}, (self._own, self._running)):
            having = {test for text, ran in texts.items() if word in text for test in ran}
            near.update(dict.fromkeys(having, 1 / max(1, len(having))))
        order = sorted(near, key=lambda test: (-near[test], self._distance[test]))
        return self._several(order), mutant.place.imported

    def _entries(self, mutant: Mutant, lines: Sequence[str]) -> list[str]:
        """What some test reads of a row of a table, or of its entry."""
        head, *key = mutant.place.names if mutant.path.endswith(".toml") else ("", "")
        heads = [line.partition("]")[0].strip("[") for line in lines if line.startswith("[")]
        above = sum(line.startswith("[") for line in lines[: mutant.lines.start])
        row = entry(mutant.path, head, heads[:above].count(head) - 1, "".join(key))
        return [line for line in self._running if line == row or (not key and row in line)]

    def _several(self, order: Sequence[str]) -> list[str]:
        """The nearest, then one of each file in turn, while the time lasts."""
        turns: Counter[str] = Counter()

        def turn(test: str) -> int:
            turns[test.partition("::")[0]] += 1
            return turns[test.partition("::")[0]]

        chosen = [*order[:FIRST_TESTS], *self._new, *sorted(order[FIRST_TESTS:], key=turn)]
        ends = accumulate(self._seconds[test] for test in chosen)
        return [test for test, end in zip(chosen, ends, strict=True) if end < JUDGING_SECONDS]


@cache
def functions_of(file: Path) -> tuple[str, dict[str, str]]:
    """The text of a file of tests, and name -> text of each of its functions."""
    text = file.read_text("utf-8")
    lines, nodes = text.split("\n"), ast.parse(text).body
    tests = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return text, {one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno]) for one in tests}


def judge(root: Path, mutants: Sequence[Mutant], until: float) -> Iterator[dict[str, Any]]:
    """What becomes of each; none is begun after `until`."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = Path(temporary).resolve() / "tree"
        other = (".git", ".venv*", ".[pr]*_cache", "*.egg-info", "build", "dist")
        ignored = shutil.ignore_patterns(*other)  # mypy's cache is worth its copies
        shutil.copytree(root, tree, symlinks=True, ignore=ignored)
        failed = run_pytest(tree, ["--collect-only"])
        said = tree.with_suffix(SAID).read_text("utf-8")
        if failed:
            raise RuntimeError(f"the tests cannot be collected: {said[-3000:]}")
        record = Record(root, [line for line in said.splitlines() if "::" in line])
        jobs = [(mutant, *record.tests(mutant)) for mutant in mutants]
        gc.freeze()
        with ProcessPoolExecutor(os.cpu_count(), FORK) as workers:
            yield from workers.map(partial(judged, tree, until), *zip(*jobs, strict=True))


def judged(tree: Path, until: float, mutant: Mutant, tests: list[str], ran: bool) -> dict[str, Any]:
    """In a worker's copy: killed, survived, not covered (no test runs it), or left (no time)."""
    copy, by = tree.with_name(f"copy{os.getpid()}"), ""
    if not copy.exists():
        shutil.copytree(tree, copy, symlinks=True)
    kind = "left" if time.monotonic() > until else "survived" if ran else "not covered"
    for some in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]) if kind != "left" else ():
        by = by or killer(copy, mutant, some)
    if kind != "left" and not by and mutant.path.endswith(".py"):
        by = types_refuse(copy, mutant)
    said = {name: getattr(mutant, name) for name in ("path", "operator", "old", "new")}
    said |= {"line": mutant.lines.start, "verdict": "killed" if by else kind, "by": by}
    return said | {"room": str(Path(mutant.path).parent), "tests": tests}


@contextlib.contextmanager
def put_into(copy: Path, mutant: Mutant) -> Iterator[None]:
    """The copy has the mutant meanwhile."""
    file = copy / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.applied(source))
    try:
        yield
    finally:
        file.write_bytes(source)


def types_refuse(copy: Path, mutant: Mutant) -> str:
    """mypy, where it finds an error that it does not find without the mutant."""
    finds = partial(subprocess.run, [sys.executable, "-m", "mypy"], cwd=copy, capture_output=True)
    with put_into(copy, mutant):
        refused = finds().returncode == 1
    return "mypy" if refused and finds().returncode == 0 else ""


def killer(copy: Path, mutant: Mutant, tests: list[str]) -> str:
    """The first test that fails with the mutant and passes without it."""
    while tests:
        with put_into(copy, mutant):
            by = first_failed(copy, tests)
        judges = (by,) if by in tests else tuple(tests)
        if not by or passes(copy, judges):
            return by
        tests = [test for test in tests if test not in judges]
    return ""


@cache
def passes(copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether tests pass without any mutant."""
    failed, said = first_failed(copy, tests), copy.with_suffix(SAID).read_text("utf-8", "replace")
    if "ERROR: not found" in said:  # a name that holds a path, for example: none of them would run
        raise RuntimeError(f"tests that were collected are not found: {said[-3000:]}")
    return not failed


def first_failed(copy: Path, tests: Sequence[str]) -> str:
    """Which test fails first, or other words where they do not end by themselves, or nothing."""
    status = in_fork(partial(run_pytest, copy, ["-x", f"--basetemp={copy}.tmp", *tests]))
    if status != pytest.ExitCode.TESTS_FAILED:
        return "it ended" if status else ""
    return failed_in(copy)[0]


def in_fork(work: Callable[[], int]) -> int:
    """What `work` returns, as an exit code; below 0 where a signal ends it, or the time."""

    def run() -> None:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        signal.alarm(5 * MOST_SECONDS)
        os._exit(work())

    fork = FORK.Process(target=run)
    fork.start()
    fork.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork.pid or 0, signal.SIGKILL)  # what its tests started
    return fork.exitcode or 0


def run_pytest(root: Path, arguments: Sequence[str]) -> int:
    """In a process for this: run pytest in a copy of the tree."""
    output = os.open(root.with_suffix(SAID), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    packages, here = str(root / ".package"), str(root.parent)
    sys.dont_write_bytecode = True  # two versions of a file within a second look alike
    os.environ |= {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["DRAFTQUANT_REQUIRE_VENDORS"] = "1"
    sys.path[:] = [packages, *(path for path in sys.path if not path.startswith(here))]
    for name, module in [*sys.modules.items()]:
        ours = name.partition(".")[0] == "draftquant" and not name.startswith(__package__)
        if ours or (getattr(module, "__file__", None) or "").startswith(here):
            del sys.modules[name]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    return int(status)


def failed_in(root: Path) -> list[str]:
    """The tests that failed in a copy of the tree."""
    said = root.with_suffix(SAID).read_text("utf-8", "replace")
    return re.findall(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said)
