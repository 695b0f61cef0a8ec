"""Mutants are judged by the tests that run their lines, the nearest first, in forks.

A function that changes gets other code in a fork of a process that has collected the tests. What
runs when modules are imported is judged by a fork that imports a changed copy of the tree.
"""

import gc
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from .changes import Mutant
from .reach import keep, known_reach
from .recording import Recorder, import_product

Said = dict[str, Any]
"""What is said of a mutant, as JSON has it."""
KINDS = ("killed", "survived", "not covered", "left")
"""A test fails; none does; none runs the line; the time was over before."""
FIRST_TESTS = 12
"""As many are collected for a mutant that an import needs; the others if they all pass."""
PRELOADED = ("torch", "transformers", "scipy.stats", "hypothesis")
RECORDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""What pytest ends with where lines could be recorded: a file may have slow tests alone."""
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tests to run, the nearest first, with a mutant in place (or without any).

    Attributes:
        seconds: CPU seconds that they take without it. passed: how many ran before, and passed.
        makes: the mutant has a hand in folders that many tests read, which have to be made anew.
    """

    number: int
    mutant: Mutant | None
    tests: tuple[str, ...]
    seconds: float
    passed: int = 0
    makes: bool = False


class Answer(NamedTuple):
    """What became of a mutant: one of `KINDS`, or "" where it could not be put in place."""

    kind: str = "killed"
    by: tuple[str, ...] = ()
    ran: int = 0
    seconds: float = 0.0
    """On a CPU, with child processes."""


class Tests:
    """A plugin that remembers which tests ran, and which failed."""

    def __init__(self) -> None:
        self._ran: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each part of each test."""
        self._ran[report.nodeid] = self._ran.get(report.nodeid, False) or report.failed

    def answer(self) -> Answer:
        """What they say of a mutant."""
        by = tuple(test for test, failed in self._ran.items() if failed)
        return Answer("killed" if by else "survived", by, len(self._ran))


# ---- Forks


def in_forks(bench: "Bench", jobs: Sequence[Job], until: float) -> Iterator[tuple[Job, Answer]]:
    """Do jobs; none is begun after a time."""
    waiting, places = iter(jobs), [*range(bench.workers)]
    running: dict[Connection, tuple[Any, Job, int, float]] = {}
    try:
        while True:
            while places and (job := next(waiting, None)) is not None:
                if time.monotonic() > until:
                    yield job, Answer("left")
                    continue
                receiver, sender = FORK.Pipe(duplex=False)
                place = places.pop()
                fork = FORK.Process(target=_fork, args=(bench, job, place, sender))
                fork.start()
                sender.close()
                limit = time.monotonic() + 60 + 20 * job.seconds  # it may wait for ever
                running[receiver] = fork, job, place, limit
            if not running:
                return
            wait([*running, *(fork.sentinel for fork, *_ in running.values())], timeout=1)
            for receiver, (fork, job, place, limit) in [*running.items()]:
                if fork.is_alive() and not receiver.poll() and time.monotonic() < limit:
                    continue
                answer = _received(receiver) if receiver.poll() else Answer()
                _end(fork)
                del running[receiver]
                places.append(place)
                bench.cleared(job, place)
                yield job, answer._replace(ran=answer.ran + job.passed)
    finally:
        for fork, *_ in running.values():
            _end(fork)


def soundly(bench: "Bench", jobs: Sequence[Job], until: float) -> Iterator[tuple[Job, Answer]]:
    """The same, but tests that fail in such forks without any mutant, too, judge none."""
    while jobs:
        killed = []
        for job, answer in in_forks(bench, jobs, until):
            if answer.by:
                killed.append((job, answer))
            else:
                yield job, answer
        tests = tuple(dict.fromkeys(chain.from_iterable(answer.by for _, answer in killed)))
        check = Job(number=-1, mutant=None, tests=tests, seconds=120)
        unsound = {
            test
            for _, without in in_forks(bench, [check] if tests else [], math.inf)
            for test in without.by
        }
        yield from (pair for pair in killed if unsound.isdisjoint(pair[1].by))
        jobs = [
            replace(job, tests=tuple(test for test in job.tests if test not in unsound))
            for job, answer in killed
            if not unsound.isdisjoint(answer.by)
        ]


def _fork(bench: "Bench", job: Job, place: int, sender: Connection) -> None:
    os.setpgid(0, 0)
    limit = int(5 + 5 * job.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    try:
        answer = bench.judged(job, place)
        taken = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        seconds = round(sum(one.ru_utime + one.ru_stime for one in taken), 2)
        sender.send(tuple(answer._replace(seconds=seconds)))
    except BaseException:  # noqa: BLE001 - whoever receives it raises it again
        sender.send(traceback.format_exc())
    finally:
        os._exit(0)


def _received(receiver: Connection) -> Answer:
    try:
        answer = receiver.recv()
    except EOFError:  # it ended in the middle of a test
        return Answer()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return Answer(*answer)


def _end(fork: Any) -> None:
    try:
        os.killpg(fork.pid, signal.SIGKILL)
    except ProcessLookupError:
        fork.kill()
    fork.join()


def enter(root: Path) -> None:
    """Make this process one of a copy of the tree, whose packages it imports anew."""
    output = os.open(said_in(root), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    packages = str(root / ".package")
    os.environ |= {
        "PYTHONPATH": packages,
        "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file within a second look alike
        "DRAFTQUANT_REQUIRE_VENDORS": "1",
    }
    sys.dont_write_bytecode = True
    sys.path[:0] = [packages]
    for name in [*sys.modules]:
        if name.partition(".")[0] == "draftquant":
            del sys.modules[name]


def run_pytest(root: Path, tests: Sequence[str], plugin: object, *options: str) -> int:
    """In a fork: run pytest in a copy of the tree, with a plugin or None."""
    enter(root)
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


# ---- Functions, changed in a process that has collected the tests


class InCollected:
    """A plugin of pytest that judges mutants in place of running the tests collected."""

    def __init__(
        self, root: Path, jobs: Sequence[Job], until: float, workers: int, sender: Connection
    ) -> None:
        self._root, self._jobs, self._until, self._sender = root, jobs, until, sender
        self.workers = workers
        self._functions: dict[tuple[str, CodeType], list[FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Send each answer as it comes."""
        import_product(self._root, {job.mutant.path for job in self._jobs if job.mutant})
        self._find_functions()
        self._config, self._items = session.config, {item.nodeid: item for item in session.items}
        self._capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        self._capture.stop_global_capturing()
        self._factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        self._temporary = self._factory.getbasetemp()
        for job, answer in soundly(self, self._jobs, self._until):
            self._sender.send((job.number, tuple(answer)))
        return True

    def judged(self, job: Job, place: int) -> Answer:
        """Run the tests until one fails; all of them without a mutant."""
        if job.mutant is not None and not self._patched(job.mutant):
            return Answer("")
        tests, plugins = Tests(), self._config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(tests)
        self._capture.start_global_capturing()
        if job.makes:
            os.environ["DRAFTQUANT_CORPORA"] = str(self._temporary / f"place{place}" / "corpora")
        self._factory._given_basetemp = self._temporary / f"place{place}"
        self._factory._basetemp = None
        items = [self._items[test] for test in job.tests]
        for item, following in pairwise([*items, None]):
            assert item is not None
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if tests.answer().by and job.mutant is not None:
                break
        return tests.answer()

    def cleared(self, _job: Job, place: int) -> None:
        """Remove what the tests wrote."""
        shutil.rmtree(self._temporary / f"place{place}", ignore_errors=True)

    def _find_functions(self) -> None:
        """All functions by their code: a name may be imported, bound or wrapped anywhere."""
        gc.unfreeze()
        paths: dict[str, str] = {}
        for function in gc.get_objects():
            if type(function) is FunctionType:
                file = function.__code__.co_filename
                if file not in paths:
                    paths[file] = os.path.relpath(os.path.realpath(file), self._root)
                self._functions[paths[file], function.__code__].append(function)
        gc.freeze()

    def _patched(self, mutant: Mutant) -> bool:
        """Give the functions that a mutant changes their new code; whether they were all found."""
        source = (self._root / mutant.path).read_bytes()
        old, new = (
            list(_codes(compile(text, mutant.path, "exec", dont_inherit=True)))
            for text in (source, mutant.applied(source))
        )
        changed = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
        found = [(f, new) for was, new in changed for f in self._functions[mutant.path, was]]
        closed_over = all(len(f.__code__.co_freevars) == len(new.co_freevars) for f, new in found)
        if len(old) != len(new) or not closed_over:
            return False
        for function, code in found:
            function.__code__ = code
        return bool(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def in_collected(
    root: Path, jobs: Sequence[Job], until: float, workers: int
) -> Iterator[tuple[Job, Answer]]:
    """Judge mutants of functions."""
    receiver, sender = FORK.Pipe(duplex=False)

    def collect() -> None:
        files = sorted({test.partition("::")[0] for job in jobs for test in job.tests})
        os._exit(run_pytest(root, files, InCollected(root, jobs, until, workers, sender)))

    fork = FORK.Process(target=collect)
    fork.start()
    sender.close()
    numbered = {job.number: job for job in jobs}
    while numbered:
        try:
            number, answer = receiver.recv()
        except EOFError:
            raise RuntimeError(f"no answer for {len(numbered)}: {last_words(root)}") from None
        yield numbered.pop(number), Answer(*answer)
    fork.join()


# ---- What runs at import, in a copy of the tree that is changed


class InCopies:
    """Judges mutants each in the copy of the tree that its place has."""

    def __init__(self, root: Path, workers: int) -> None:
        self._root, self.workers = root, workers
        self._copies = [root.with_name(f"copy{place}") for place in range(workers)]
        for copy in self._copies:
            shutil.copytree(root, copy, symlinks=True)
        for module in PRELOADED:
            __import__(module)

    def judged(self, job: Job, place: int) -> Answer:
        """Run the tests until one fails; all of them without a mutant."""
        copy, tests = self._copies[place], Tests()
        options = [f"--basetemp={copy.with_suffix('.tmp')}"]
        if job.mutant is not None:
            file = copy / job.mutant.path
            file.write_bytes(job.mutant.applied(file.read_bytes()))
            options.append("-x")
        status = run_pytest(copy, job.tests, tests, *options)
        judged = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        return tests.answer() if judged else Answer()  # it cannot even be imported

    def cleared(self, job: Job, place: int) -> None:
        """Remove what the tests wrote, and take the change back."""
        copy = self._copies[place]
        shutil.rmtree(copy.with_suffix(".tmp"), ignore_errors=True)
        if job.mutant is not None:
            shutil.copy2(self._root / job.mutant.path, copy / job.mutant.path)


def in_copies(
    root: Path, jobs: Sequence[Job], until: float, workers: int
) -> Iterator[tuple[Job, Answer]]:
    """Judge by the nearest tests, then by the others where none of those failed."""
    bench = InCopies(root, workers)
    first = [replace(job, tests=job.tests[:FIRST_TESTS], seconds=job.seconds + 10) for job in jobs]
    rest = {job.number: job.tests[FIRST_TESTS:] for job in jobs}
    later = []
    for job, answer in soundly(bench, first, until):
        if answer.kind == "survived" and rest[job.number]:
            later.append(replace(job, tests=rest[job.number], passed=answer.ran))
        else:
            yield job, answer
    yield from soundly(bench, later, until)


Bench = InCollected | InCopies
"""Where jobs are done: in a fork for each, so many at a time, each in a place of its own.

`judged` puts the mutant in place, in the fork, and runs the tests; `cleared` takes away, afterwards
and outside of it, what it left in this place.
"""


# ---- All of them


def judge(root: Path, mutants: Sequence[Mutant], until: float, workers: int) -> Iterator[Said]:
    """What becomes of each, as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary).resolve() / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "*_cache", "*.egg-info", "build", "dist")
        shutil.copytree(root, copy, symlinks=True, ignore=ignored)
        kept = root / "build" / "mutants"
        reach, missing = known_reach(copy, kept, {mutant.path for mutant in mutants})
        if missing:
            print(f"recording which lines {len(missing)} files of tests run", file=sys.stderr)
            record(copy, missing, kept, workers)
            reach, _ = known_reach(copy, kept, ())
        tests = [*reach.chosen(copy, mutants)]
        jobs: list[Job] = []
        of_imports: list[Job] = []
        for number, (mutant, chosen) in enumerate(zip(mutants, tests, strict=True)):
            seconds = sum(reach.seconds[test] for test in chosen)
            makes = reach.makes(mutant)
            job = Job(number=number, mutant=mutant, tests=chosen, seconds=seconds, makes=makes)
            if not chosen:
                yield verdict(mutant, Answer("not covered"), chosen)
            else:
                (of_imports if mutant.place.imported else jobs).append(job)
        for job, answer in in_collected(copy, jobs, until, workers) if jobs else ():
            unsure = answer.kind == "survived" and reach.at_import(mutants[job.number])
            if unsure or not answer.kind:
                of_imports.append(job)
            else:
                yield verdict(mutants[job.number], answer, tests[job.number])
        for job, answer in in_copies(copy, of_imports, until, workers) if of_imports else ():
            yield verdict(mutants[job.number], answer, tests[job.number])


def record(copy: Path, files: Sequence[str], kept: Path, workers: int) -> None:
    """Run files of tests, and keep which lines each test runs."""
    recorded = copy.with_name("recorded")
    recorded.mkdir()

    def run() -> None:
        shared = (copy / "tests" / "workers.py").is_file()
        options = ["--workers", str(workers)] if shared else []
        status = run_pytest(copy, files, Recorder(copy, recorded), *options)
        os._exit(status not in RECORDED)

    fork = FORK.Process(target=run)
    fork.start()
    fork.join()
    if fork.exitcode:
        raise RuntimeError(f"the tests could not be recorded: {last_words(copy)}")
    keep(copy, recorded, kept, files)


def verdict(mutant: Mutant, answer: Answer, tests: Sequence[str]) -> Said:
    """What is said of a mutant."""
    return {
        "room": Path(mutant.path).parent.as_posix(),
        "path": mutant.path,
        "line": mutant.lines.start,
        "operator": mutant.operator,
        "old": mutant.old,
        "new": mutant.new,
        "verdict": answer.kind,
        "by": answer.by[:1],
        "ran": answer.ran,
        "seconds": answer.seconds,
        "tests": tests[: answer.ran] if answer.kind == "survived" else (),
    }
