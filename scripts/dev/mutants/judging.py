"""Mutants are judged by the tests that run their lines, the nearest first.

Each worker is a fork of a process that has collected the tests, and forks again for each mutant. A
function that changes gets other code there; what runs at import is imported anew from a copy of the
tree that is changed.
"""

import gc
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from .changes import Mutant
from .recording import import_product

KINDS = ("killed", "survived", "not covered", "left")
"""A test fails; none does; none runs the line; the time was over before."""
MOST_TESTS, MOST_SECONDS = 120, 20
"""Of the tests that run a line, those nearest to it that judge a mutant (at import a quarter)."""
FIRST_TESTS = 12
"""As many are collected for a mutant that an import needs; the others if they all pass."""
ENDED, LOST = ("it ended", 0), ("it said nothing", 0)
FORK = multiprocessing.get_context("fork")
Said = dict[str, Any]
"""What is said of a mutant, as JSON has it."""


class Job(NamedTuple):
    """A mutant, and the tests that are to notice it.

    `at_import`: it changes what runs before any test. `makes`: what makes folders for many tests.
    """

    mutant: Mutant
    tests: list[str]
    at_import: bool
    makes: bool


class Reach:
    """Which test runs which line, as it was recorded of these sources or of earlier ones."""

    def __init__(self, root: Path, record: Mapping[str, Any]) -> None:
        self._root, self._sources, self.tests = root, record["sources"], record["tests"]
        self._texts = {
            f"tests/{p.name}": p.read_text("utf-8") for p in root.glob("tests/test_*.py")
        }
        self.changed = {
            path for path, text in self._texts.items() if text != self._sources.get(path)
        }
        size = {test: sum(map(len, one["lines"].values())) for test, one in self.tests.items()}
        cases: Counter[str] = Counter()
        self._rank: dict[str, tuple[int, int]] = {}
        self._running: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for test in sorted(size, key=size.__getitem__):
            cases[test.partition("[")[0]] += 1
            self._rank[test] = (size[test] * cases[test.partition("[")[0]], size[test])
        for test in sorted(size, key=self._rank.__getitem__):
            for path, lines in self.tests[test]["lines"].items():
                for line in lines:
                    self._running[path][line].append(test)
        self._made = {(p, n) for t in self.tests.values() for p in t["made"] for n in t["made"][p]}
        self._with: dict[str, set[str]] = {}
        self._before: dict[str, dict[int, int]] = {}

    def job(self, mutant: Mutant) -> Job:
        """A mutant with the nearest tests: of fewest lines, which count double in a second case."""
        path, place = mutant.path, mutant.place
        line, known = self._recorded_line(path, place.statement)
        ran = self._running.get(path, {}).get(line, [])
        at_import = place.imported or "" in ran or not ran  # a command that a test starts may
        tests = [] if place.imported else [test for test in ran if test]
        if at_import or not known:
            tests += self._related(path, {*place.names, *re.findall(r"[\w.-]{4,}", mutant.old)})
        tests = [*dict.fromkeys(tests)][: MOST_TESTS // (1 + 3 * at_import)]
        return Job(mutant, tests, at_import, (path, line) in self._made)

    def _recorded_line(self, path: str, line: int) -> tuple[int, bool]:
        """Which line it was when it was recorded: where it was none, one above it that ran."""
        if path not in self._before:
            was = self._sources.get(path, "").splitlines()
            now = (self._root / path).read_text("utf-8").splitlines()
            blocks = SequenceMatcher(None, was, now, autojunk=False).get_matching_blocks()
            pairs = ((b + n, a + n) for a, b, size in blocks for n in range(1, size + 1))
            self._before[path] = dict(pairs)
        before, ran = self._before[path], self._running.get(path, {})
        if line in before:
            return before[line], True
        above = (before[n] for n in range(line, 0, -1) if n in before)
        return next((n for n in above if n in ran), 0), False

    def _related(self, path: str, words: Iterable[str]) -> list[str]:
        """The tests that run lines with these words, or have them; the rarer ones for more."""
        table = (self._root / path).parent.glob("*.py") if path.endswith(".toml") else ()
        paths = [path, *(module.relative_to(self._root).as_posix() for module in table)]
        users = [test for p in paths for ran in self._running.get(p, {}).values() for test in ran]
        weights = Counter(dict.fromkeys(users, 1))
        for word in words:
            if word not in self._with:
                self._with[word] = set(self._tests_with(word))
            near = self._with[word]
            weights.update(dict.fromkeys(near, 1_000_000 // max(1, len(near))))
        del weights[""]
        return sorted(weights, key=lambda test: (-weights[test], self._rank[test]))

    def _tests_with(self, word: str) -> Iterator[str]:
        files = {path for path, text in self._texts.items() if word in text}
        yield from (test for test in self.tests if test.partition("::")[0] in files)
        for path, running in self._running.items():
            starts = sorted(running)
            for number, line in enumerate(self._sources[path].splitlines(), 1):
                if word in line and re.search(rf"\b{re.escape(word)}\b", line):
                    yield from running[starts[max(0, bisect(starts, number) - 1)]]


class Tests:
    """A plugin that ends with the first test that fails, or when the time is over."""

    def __init__(self) -> None:
        self.failed = ""
        self.ran: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Leave out what comes after that."""
        return True if self.failed or time.process_time() > MOST_SECONDS else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each part of each test."""
        self.ran.add(report.nodeid)
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_pytest(root: Path, tests: Sequence[str], plugin: object, *options: str) -> int:
    """In a process for this: run pytest in a copy of the tree, with a plugin or None."""
    output = os.open(said_in(root), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    packages, here = str(root / ".package"), str(root.parent)
    sys.dont_write_bytecode = True  # two versions of a file within a second look alike
    os.environ |= {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["DRAFTQUANT_REQUIRE_VENDORS"] = "1"
    sys.path[:] = [packages, *(path for path in sys.path if not path.startswith(here))]
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] == "draftquant" or file.startswith(here):
            del sys.modules[name]
    plugins = [] if plugin is None else [plugin]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *options, *tests], plugins=plugins)
    sys.stdout.flush()
    return int(status)


def said_in(root: Path) -> Path:
    """What pytest prints in a copy of the tree."""
    return root.with_suffix(".out")


def last_words(root: Path) -> str:
    """The end of that."""
    return said_in(root).read_text(encoding="utf-8", errors="replace")[-3000:]


def in_fork(work: Callable[[], tuple[str, int]]) -> tuple[str, int]:
    """What `work` returns in a fork; `ENDED` where a signal ends it or it takes too long.

    `LOST` where it ends by itself without an answer: that shows neither a failure nor none.
    """
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (3 * MOST_SECONDS, 4 * MOST_SECONDS))
        try:
            sender.send(work())
        finally:
            os._exit(0)

    fork = FORK.Process(target=run)
    fork.start()
    sender.close()
    try:
        answer: tuple[str, int] = receiver.recv() if receiver.poll(15 * MOST_SECONDS) else ENDED
    except EOFError:
        fork.join(MOST_SECONDS)
        answer = LOST if fork.exitcode == 0 else ENDED
    try:
        os.killpg(fork.pid or 0, signal.SIGKILL)
    except ProcessLookupError:
        fork.kill()
    fork.join()
    return answer


class Judge:
    """A plugin of pytest that judges mutants in place of running the tests collected."""

    def __init__(
        self, root: Path, reach: Reach, jobs: list[Job], until: float, say: Callable[[Said], None]
    ) -> None:
        self._root, self._reach, self._jobs = root, reach, jobs
        self._until, self._say = until, say
        self._functions: dict[tuple[str, CodeType], list[FunctionType]] = defaultdict(list)
        self._sound: set[tuple[str, bool]] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork the workers, and hand on what they say."""
        import_product({job.mutant.path for job in self._jobs})
        gc.unfreeze()
        for function in gc.get_objects():  # a name may be imported, bound or wrapped anywhere
            if type(function) is FunctionType:
                code = function.__code__
                self._functions[os.path.realpath(code.co_filename), code].append(function)
        gc.freeze()
        self._session, self._items = session, {item.nodeid: item for item in session.items}
        new = [test for test in self._items if test not in self._reach.tests]
        for job in self._jobs:
            job.tests[:] = [test for test in [*job.tests, *new] if test in self._items]
        self._capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        self._capture.stop_global_capturing()
        workers, numbers, receiving = os.cpu_count() or 1, FORK.SimpleQueue(), []
        for number in [*range(len(self._jobs)), *[None] * workers]:
            numbers.put(number)
        for worker in range(workers):
            receiver, sender = FORK.Pipe(duplex=False)
            copy = self._root.with_name(f"copy{worker}")
            FORK.Process(target=self._work, args=(copy, numbers, sender)).start()
            sender.close()
            receiving.append(receiver)
        while receiving:
            for ready in wait(receiving):
                assert isinstance(ready, Connection)
                try:
                    self._say(ready.recv())
                except EOFError:
                    receiving.remove(ready)
        return True

    def _work(self, copy: Path, numbers: Any, sender: Connection) -> None:
        """A worker: judge one mutant after the other."""
        self._copy, self._temporary = copy, copy.with_suffix(".tmp")
        shutil.copytree(self._root, copy, symlinks=True, copy_function=os.link)
        while (number := numbers.get()) is not None:
            job, before = self._jobs[number], _cpu_seconds()
            kind, by, ran = "left", "", 0
            if time.monotonic() < self._until:
                by, ran = self._noticed_by(job)
                kind = "killed" if by else "survived" if job.tests else "not covered"
            said = {name: getattr(job.mutant, name) for name in ("path", "operator", "old", "new")}
            said |= {"room": str(Path(job.mutant.path).parent), "line": job.mutant.lines.start}
            said |= {"verdict": kind, "by": by, "ran": ran, "seconds": _cpu_seconds() - before}
            sender.send(said | {"tests": job.tests if kind == "survived" else []})

    def _noticed_by(self, job: Job) -> tuple[str, int]:
        """The test that notices a mutant, or none; and how many ran."""
        self._patches = [] if job.mutant.place.imported else self._new_codes(job.mutant)
        by, ran = self._first_failed(job, job.tests, anew=False) if self._patches else ("", 0)
        for tests in (job.tests[:FIRST_TESTS], job.tests[FIRST_TESTS:]):
            if not by and (job.at_import or not self._patches):
                by, more = self._first_failed(job, tests, anew=True)
                ran += more
        return by, ran

    def _first_failed(self, job: Job, tests: list[str], *, anew: bool) -> tuple[str, int]:
        """The first test that fails with the mutant and passes without it, and how many ran."""
        run = self._anew if anew else self._in_collected
        while tests:
            by, ran = in_fork(partial(run, job, tests, mutated=True))
            if (by, ran) == LOST:
                return "", 0
            if by not in tests or (by, anew) in self._sound:
                return by, ran
            if not in_fork(partial(run, job, [by], mutated=False))[0]:
                self._sound.add((by, anew))
                return by, ran
            tests = [test for test in tests if test != by]
        return "", 0

    def _anew(self, job: Job, tests: list[str], *, mutated: bool) -> tuple[str, int]:
        """In a fork: import all modules anew, from the copy."""
        file, source = self._copy / job.mutant.path, (self._root / job.mutant.path).read_bytes()
        file.unlink()  # it is linked to the original
        file.write_bytes(job.mutant.applied(source) if mutated else source)
        noted = Tests()
        status = run_pytest(self._copy, tests, noted, f"--basetemp={self._temporary}")
        file.write_bytes(source)
        read = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        return noted.failed if read else "it is not read", len(noted.ran)

    def _in_collected(self, job: Job, tests: list[str], *, mutated: bool) -> tuple[str, int]:
        """In a fork: give functions their new code, and run tests that are collected."""
        for function, code in self._patches if mutated else ():
            function.__code__ = code
        noted, config = Tests(), self._session.config
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(noted)
        self._capture.start_global_capturing()
        if job.makes:
            corpora = os.environ["DRAFTQUANT_CORPORA"] = str(self._copy.with_suffix(".corpora"))
            shutil.rmtree(corpora, ignore_errors=True)
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._given_basetemp, factory._basetemp = self._temporary, None
        for item, following in pairwise([*(self._items[test] for test in tests), None]):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return noted.failed, len(noted.ran)

    def _new_codes(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
        """The functions that a mutant changes with their new code; none where not all are found."""
        file = self._root / mutant.path
        source = file.read_bytes()
        old, new = (
            [*_codes(compile(text, mutant.path, "exec", dont_inherit=True))]
            for text in (source, mutant.applied(source))
        )
        changed = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
        found = [(f, code) for was, code in changed for f in self._functions[str(file), was]]
        alike = all(len(f.__code__.co_freevars) == len(code.co_freevars) for f, code in found)
        return found if alike and len(old) == len(new) else []


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _cpu_seconds() -> float:
    taken = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in taken)
