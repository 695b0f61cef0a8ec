"""Mutants are judged alone by the nearest tests that run their lines, then together by all checks.

Those of a batch that are left alive are put into one copy of the tree. Where all everyday tests,
mypy or ruff notice something, halves of the batch say which mutant it was.
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
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest

from .changes import Mutant
from .recording import KEPT, ROOMS, known

NEAREST_SECONDS, ALONE_SECONDS, TOGETHER_SECONDS = 8.0, 60, 300
"""CPU seconds of a mutant's nearest tests as recorded, and the most of a process that runs some."""
TOGETHER = 50
"""So many mutants are judged together."""
CHECKS = {"mypy": (), "ruff": ("check", "--quiet", "--select", "ARG,F", *ROOMS)}
SAID = ".out"
"""Beside a copy of the tree: what pytest prints there."""
FORK = multiprocessing.get_context("fork")


class Trial(NamedTuple):
    """A mutant, its nearest tests, and what became of it.

    `by` is the check that failed. `covered`: some test runs the line, as far as one can tell.
    """

    mutant: Mutant
    tests: list[str]
    covered: bool
    verdict: str = ""
    by: str = ""


class Record:
    """Which test runs which line, as it was recorded of this tree or of an earlier one."""

    def __init__(self, root: Path, collected: Sequence[str]) -> None:
        with (root / KEPT).open(encoding="utf-8") as lines:
            known_lines: list[str] = json.loads(next(lines))
            kept = [json.loads(line) for line in lines]
        self._root, self._running = root, defaultdict[str, list[str]](list)
        self._seconds: dict[str, float] = {test: spent for test, _, spent in kept}
        cases: Counter[str] = Counter()

        def distance(one: tuple[str, list[int], float]) -> int:
            cases[one[0].partition("[")[0]] += 1
            return len(one[1]) * cases[one[0].partition("[")[0]]

        here = {*collected}
        fewest_lines = sorted((one for one in kept if one[0] in here), key=lambda one: len(one[1]))
        for test, numbers, _ in sorted(fewest_lines, key=distance):
            file, _, name = test.partition("[")[0].partition("::")
            whole, functions = functions_of(root / file)
            for text in {whole, functions.get(name, ""), *(known_lines[n] for n in numbers)}:
                self._running[text].append(test)

    def nearest(self, mutant: Mutant) -> Trial:
        """With the tests that run the line, those that run fewest lines first.

        Of what runs at import, or what no test runs, those that have or run most words of it.
        """
        lines = (self._root / mutant.path).read_text("utf-8").split("\n")
        ran = self._running.get(known(mutant.path, lines, mutant.place.statement), [])
        if mutant.place.imported or not ran:
            words = re.findall(r"[\w.-]{4,}", f"{mutant.path} {mutant.old}")
            near: Counter[str] = Counter()
            for word in {*mutant.place.names, *words}:
                having = {
                    test for text, some in self._running.items() if word in text for test in some
                }
                near.update(dict.fromkeys(having, 1 / max(1, len(having))))
            nearest = [test for test, _ in near.most_common()]
        else:
            nearest = ran
        ends = accumulate(self._seconds[test] for test in nearest)
        within = [test for test, end in zip(nearest, ends, strict=True) if end < NEAREST_SECONDS]
        return Trial(mutant, within or nearest[:1], mutant.place.imported or bool(ran))


@cache
def functions_of(file: Path) -> tuple[str, dict[str, str]]:
    """The text of a file of tests, and name -> text of each of its functions."""
    text = file.read_text("utf-8")
    lines, nodes = text.split("\n"), ast.parse(text).body
    tests = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return text, {one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno]) for one in tests}


def judge(root: Path, mutants: Sequence[Mutant], until: float) -> Iterator[Trial]:
    """What becomes of each: killed, survived, not covered, or left, none begun after `until`."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = Path(temporary).resolve() / "tree"
        other = (".git", ".venv*", ".[pr]*_cache", "*.egg-info", "build", "dist")
        ignored = shutil.ignore_patterns(*other)  # mypy's cache is worth its copies
        shutil.copytree(root, tree, symlinks=True, ignore=ignored)
        failed = run_pytest(tree, ["--collect-only"])
        said = tree.with_suffix(SAID).read_text("utf-8")
        if failed:
            raise RuntimeError(f"the tests cannot be collected: {said[-3000:]}")
        collected = [line for line in said.splitlines() if "::" in line]
        waiting = list(map(Record(root, collected).nearest, mutants))
        gc.freeze()
        alive: list[Trial] = []
        checks = [*CHECKS, *dict.fromkeys(test.partition("::")[0] for test in collected)]
        with ProcessPoolExecutor(os.cpu_count(), FORK) as workers:
            for one in workers.map(partial(judged_alone, tree, until), waiting):
                if one.verdict:
                    yield one
                else:
                    alive.append(one)
            for batch in apart(alive):
                judges = failing_with(tree, [one.mutant for one in batch], checks)
                judges = passing_without(tree, tuple(judges))
                parts = [batch[n::4] for n in range(4)]
                for found in workers.map(partial(judged_together, tree, judges), parts):
                    yield from found


def judged_alone(tree: Path, until: float, one: Trial) -> Trial:
    """In a worker's copy of the tree: without a verdict where the nearest tests do not fail."""
    if time.monotonic() > until:
        return one._replace(verdict="left")
    copy = copy_of(tree)
    killers = passing_without(copy, tuple(failing_with(copy, [one.mutant], one.tests)))
    return one._replace(verdict="killed", by=killers[0]) if killers else one


def judged_together(tree: Path, judges: Sequence[str], some: Sequence[Trial]) -> list[Trial]:
    """In a worker's copy: by checks that fail with some of these mutants, or with others."""
    copy = copy_of(tree)
    judges = failing_with(copy, [one.mutant for one in some], judges)
    if len(some) > 1 and judges:
        halves = some[::2], some[1::2]
        return [one for half in halves for one in judged_together(tree, judges, half)]
    by = "".join(passing_without(copy, tuple(judges))[:1])
    kinds = ("killed" if by else "survived" if one.covered else "not covered" for one in some)
    return [one._replace(verdict=kind, by=by) for one, kind in zip(some, kinds, strict=True)]


def copy_of(tree: Path) -> Path:
    """A worker's own."""
    copy = tree.with_name(f"copy{os.getpid()}")
    if not copy.exists():
        shutil.copytree(tree, copy, symlinks=True)
    return copy


def apart(alive: Sequence[Trial]) -> list[list[Trial]]:
    """Batches in which none changes what another one changes."""
    batches: list[list[Trial]] = []
    for one in alive:
        path, span = one.mutant.path, one.mutant.span
        for batch in batches:
            others = (other.mutant.span for other in batch if other.mutant.path == path)
            if len(batch) < TOGETHER and all(
                other.stop <= span.start or span.stop <= other.start for other in others
            ):
                batch.append(one)
                break
        else:
            batches.append([one])
    return batches


def failing_with(copy: Path, mutants: Sequence[Mutant], checks: Sequence[str]) -> list[str]:
    """The checks that fail with some mutants; of one mutant the first."""
    if not mutants or not checks:
        return []
    with put_into(copy, mutants):
        return failing(copy, checks, fast=len(mutants) == 1)


@cache
def passing_without(copy: Path, checks: tuple[str, ...]) -> list[str]:
    """Those of them that pass without a mutant."""
    anyway = failing(copy, checks) if checks else []
    said = copy.with_suffix(SAID).read_text("utf-8", "replace") if {*anyway} - {*CHECKS} else ""
    if "ERROR: not found" in said:  # a name that holds a path, for example
        raise RuntimeError(f"tests that were collected are not found: {said[-3000:]}")
    return [check for check in checks if check not in anyway]


@contextlib.contextmanager
def put_into(copy: Path, mutants: Sequence[Mutant]) -> Iterator[None]:
    """The copy has the mutants meanwhile."""
    sources = {copy / mutant.path: (copy / mutant.path).read_bytes() for mutant in mutants}
    for mutant in sorted(mutants, key=lambda mutant: -mutant.span.start):
        file = copy / mutant.path
        file.write_bytes(mutant.applied(file.read_bytes()))
    try:
        yield
    finally:
        for file, source in sources.items():
            file.write_bytes(source)


def failing(copy: Path, checks: Sequence[str], *, fast: bool = False) -> list[str]:
    """Which tests, files of tests and other checks fail: the first of them, if `fast`.

    All of the tests, where they do not end by themselves.
    """
    python = partial(subprocess.run, cwd=copy, capture_output=True)
    commands = {c: [sys.executable, "-m", c, *CHECKS[c]] for c in checks if c in CHECKS}
    failed = [check for check, command in commands.items() if python(command).returncode == 1]
    if (fast and failed) or not (tests := [check for check in checks if check not in CHECKS]):
        return failed
    workers = os.cpu_count() if any("::" not in test for test in tests) else 1
    options = ["-x"] if fast else ["--continue-on-collection-errors", f"--workers={workers}"]
    run = partial(run_pytest, copy, [f"--basetemp={copy}.tmp", *options, *tests])
    status = in_fork(run, ALONE_SECONDS if fast else TOGETHER_SECONDS)
    ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return failed + (failed_in(copy) if ended else tests)


def in_fork(work: Callable[[], int], most_seconds: int) -> int:
    """What `work` returns, as an exit code; below 0 where a signal ends it, or the time."""

    def run() -> None:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds))
        signal.alarm(5 * most_seconds)
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
    counts = "tests/test_rooms.py::test_the_house_grows_in_no_sum"  # of words, not what they do
    options = ["-q", "-p", "no:cacheprovider", "--deselect", counts]
    status = pytest.main([*options, *arguments])
    sys.stdout.flush()
    return int(status)


def failed_in(root: Path) -> list[str]:
    """The tests that failed in a copy of the tree."""
    said = root.with_suffix(SAID).read_text("utf-8", "replace")
    return re.findall(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said)
