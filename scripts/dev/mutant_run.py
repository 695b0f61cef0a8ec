"""`./scripts/test --mutants`: which small changes of the product does no everyday test notice?

A mutant (mutants.py) is judged by the tests that run its line, the most specific first, in a fork
of a process that has collected them: there the functions that it changes get other code. What runs
when modules are imported is judged by a fork that imports a changed copy of the tree instead. Who
runs which line is recorded once, and kept in build/mutants as long as the sources are the same.

The last line of a run says how many survived; exit code 3 where any did.
"""

import argparse
import gc
import hashlib
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
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from . import ROOT
from .mutant_reach import ROOMS, Recorder, import_product, keep, known_reach, product
from .mutants import Mutant, mutants_of

FIRST_TESTS = 12
"""As many are collected for a mutant that a fresh import needs; the others if they all pass."""
PRELOADED = ("torch", "transformers", "scipy.stats", "hypothesis")
WORKERS = 2
FORK = multiprocessing.get_context("fork")
Answer = dict[str, Any]
"""What a fork says of a mutant: `verdict`, `by` (the test that failed), `ran` (how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tests to run with a mutant in place, or without any.

    Attributes:
        number: of the mutant. seconds: CPU seconds that the tests take without it.
    """

    number: int
    mutant: Mutant | None
    tests: tuple[str, ...]
    seconds: float


class Failures:
    """A plugin that remembers which tests failed, and how many ran."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each part of each test."""
        self.ran.add(report.nodeid)
        if report.failed:
            self.failed.append(report.nodeid)

    def answer(self) -> Answer:
        """What they say of a mutant."""
        verdict = "killed" if self.failed else "survived"
        return {"verdict": verdict, "by": self.failed[:1], "ran": len(self.ran)}


# ---- Forks


Judge = Callable[[Job, int], Answer]


def in_forks(
    jobs: Iterable[Job], judge: Judge, until: float, restore: Judge | None = None
) -> Iterator[tuple[Job, Answer]]:
    """Judge each job in a fork of its own, in one of as many places as there are workers."""
    waiting, places = iter(jobs), [*range(WORKERS)]
    running: dict[Connection, tuple[Any, Job, int, float]] = {}
    try:
        while True:
            while places and (job := next(waiting, None)) is not None:
                if time.monotonic() > until:
                    yield job, {"verdict": "left", "by": [], "ran": 0}
                    continue
                receiver, sender = FORK.Pipe(duplex=False)
                place = places.pop()
                fork = FORK.Process(target=_judge, args=(judge, job, place, sender))
                fork.start()
                sender.close()
                limit = time.monotonic() + 60 + 20 * job.seconds
                running[receiver] = fork, job, place, limit
            if not running:
                return
            wait([*running, *(fork.sentinel for fork, *_ in running.values())], timeout=1)
            for receiver, (fork, job, place, limit) in [*running.items()]:
                if receiver.poll():
                    answer = _received(receiver)
                elif not fork.is_alive() or time.monotonic() > limit:
                    answer = {"verdict": "killed", "by": [], "ran": 0}
                else:
                    continue
                _end(fork)
                del running[receiver]
                places.append(place)
                if restore is not None:
                    restore(job, place)
                yield job, answer
    finally:
        for fork, *_ in running.values():
            _end(fork)


def _received(receiver: Connection) -> Answer:
    try:
        answer: Answer = receiver.recv()
    except EOFError:  # it ended in the middle of a test
        return {"verdict": "killed", "by": [], "ran": 0}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _end(fork: Any) -> None:
    try:
        os.killpg(fork.pid, signal.SIGKILL)
    except ProcessLookupError:
        fork.kill()
    fork.join()


def _judge(judge: Judge, job: Job, place: int, sender: Connection) -> None:
    """A fork: answer, or say what went wrong outside of the tests."""
    os.setpgid(0, 0)
    limit = int(30 + 5 * job.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    try:
        answer = judge(job, place)
        sender.send(answer)
    except BaseException:  # noqa: BLE001 - whoever waits for it raises it again
        sender.send({"error": traceback.format_exc()})
    finally:
        sender.close()
        os._exit(0)


def enter(root: Path, said: Path) -> None:
    """Make this process one of a copy of the tree, whose packages it imports anew."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    packages = str(root / ".package")
    os.environ |= {
        "PYTHONPATH": packages,
        "PYTHONDONTWRITEBYTECODE": "1",
        "DRAFTQUANT_REQUIRE_VENDORS": "1",
    }
    sys.dont_write_bytecode = True
    sys.path[:0] = [packages]
    for name in [*sys.modules]:
        if name.partition(".")[0] == "draftquant":
            del sys.modules[name]


# ---- Functions changed in a process that has collected the tests


class InCollected:
    """A plugin of pytest that judges mutants in place of running the tests collected."""

    def __init__(self, root: Path, jobs: Sequence[Job], until: float, sender: Connection) -> None:
        self._root, self._jobs, self._until, self._sender = root, jobs, until, sender
        self._functions: dict[tuple[str, CodeType], list[FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Send each answer as it comes."""
        import_product(self._root, {job.mutant.path for job in self._jobs if job.mutant})
        self._find_functions()
        self._session, self._items = session, {item.nodeid: item for item in session.items}
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        self._temporary = factory.getbasetemp()
        for job, answer in in_forks(self._jobs, self.judged, self._until, self.restored):
            self._sender.send((job.number, answer))
        self._sender.close()
        return True

    def restored(self, _job: Job, place: int) -> Answer:
        """Remove what the tests of a mutant wrote."""
        shutil.rmtree(self._temporary / f"mutant{place}", ignore_errors=True)
        return {}

    def judged(self, job: Job, place: int) -> Answer:
        """In a fork: change the functions, and run the tests until one fails."""
        if job.mutant is not None and not self.patched(job.mutant):
            return {"verdict": "unpatched"}
        session, failures = self._session, Failures()
        config = session.config
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(failures)
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.start_global_capturing()
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._given_basetemp, factory._basetemp = self._temporary / f"mutant{place}", None
        items = [self._items[test] for test in job.tests]
        for item, following in pairwise([*items, None]):
            assert item is not None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if failures.failed and job.mutant is not None:
                break
        return failures.answer() | ({} if job.mutant else {"by": failures.failed})

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

    def patched(self, mutant: Mutant) -> bool:
        """Give the functions that a mutant changes their new code; whether all could be found."""
        source = (self._root / mutant.path).read_bytes()
        old, new = (
            list(_codes(compile(text, mutant.path, "exec", dont_inherit=True)))
            for text in (source, mutant.applied(source))
        )
        if len(old) != len(new):
            return False
        changed = False
        for before, after in zip(old[1:], new[1:], strict=True):
            for function in self._functions.get((mutant.path, before), ()):
                if before != after:
                    try:
                        function.__code__ = after
                    except ValueError:  # it closes over other names than before
                        return False
                    changed = True
        return changed


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def in_collected(root: Path, jobs: Sequence[Job], until: float) -> Iterator[tuple[Job, Answer]]:
    """Judge mutants of functions."""
    receiver, sender = FORK.Pipe(duplex=False)

    def collect() -> None:
        said = root.parent / "collected.out"
        enter(root, said)
        files = sorted({test.partition("::")[0] for job in jobs for test in job.tests})
        plugin = InCollected(root, jobs, until, sender)
        status = pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[plugin])
        sys.stdout.flush()
        os._exit(int(status))

    fork = FORK.Process(target=collect)
    fork.start()
    sender.close()
    numbered = {job.number: job for job in jobs}
    while numbered:
        try:
            number, answer = receiver.recv()
        except EOFError:
            said = (root.parent / "collected.out").read_text("utf-8", errors="replace")
            raise RuntimeError(f"the tests were not collected: {said[-3000:]}") from None
        yield numbered.pop(number), answer
    fork.join()


# ---- Copies of the tree, changed and imported anew


class InCopies:
    """Judges mutants of what is imported, each in a copy of the tree that this worker has."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._copies = [root.parent / f"copy{place}" for place in range(WORKERS)]
        for copy in self._copies:
            shutil.copytree(root, copy, symlinks=True)
        for module in PRELOADED:
            __import__(module)

    def judged(self, job: Job, place: int) -> Answer:
        """In a fork: change the copy, and run the tests until one fails."""
        copy, failures = self._copies[place], Failures()
        enter(copy, copy.with_suffix(".out"))
        if job.mutant is not None:
            file = copy / job.mutant.path
            file.write_bytes(job.mutant.applied(file.read_bytes()))
        temporary = copy.with_suffix(".tmp")
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={temporary}"]
        options += ["-x"] if job.mutant else []
        status = pytest.main([*options, *job.tests], plugins=[failures])
        if job.mutant is None:
            return failures.answer() | {"by": failures.failed}
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return {"verdict": "killed", "by": ["what it imports"], "ran": 0}
        return failures.answer()

    def restored(self, job: Job, place: int) -> Answer:
        """Take a change back."""
        copy = self._copies[place]
        shutil.rmtree(copy.with_suffix(".tmp"), ignore_errors=True)
        if job.mutant is not None:
            shutil.copy2(self._root / job.mutant.path, copy / job.mutant.path)
        return {}


# ---- Which mutants


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
    for path in git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        count = (root / path).read_bytes().count(b"\n")
        lines[path].update(range(1, count + 2))
    return lines


def git(root: Path, *arguments: str) -> str:
    """What git prints; empty where it knows no such commit."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def landed(root: Path) -> str | None:
    """Where this branch left origin/main, else main; for what has landed, the commit before it."""
    head = git(root, "rev-parse", "HEAD")
    for name in ("origin/main", "main"):
        base = git(root, "merge-base", name, "HEAD").strip()
        if base and (base != head.strip() or git(root, "status", "--porcelain", *ROOMS)):
            return base
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD~1").strip() or None


def sampled(
    mutants: Sequence[Mutant], sources: dict[str, bytes], count: int, seed: str
) -> list[Mutant]:
    """So many lines, and a mutant of each: the same ones as long as those lines stay the same."""

    def drawn(*parts: object) -> str:
        return hashlib.sha256(repr((seed, *parts)).encode()).hexdigest()

    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        lines[mutant.path, mutant.line].append(mutant)
    order = sorted(lines.values(), key=lambda found: drawn(found[0].path, found[0].old, len(found)))
    chosen: list[Mutant] = []
    for found in order:
        if len(chosen) == count:
            break
        by_draw = sorted(found, key=lambda one: drawn(one.path, one.old, one.new, one.span))
        chosen += [m for m in by_draw if m.parses(sources[m.path])][:1]
    return chosen


def listed(root: Path) -> set[tuple[str, str, str]]:
    """The mutants that change nothing for anybody: path, old, new of tests/equivalents.toml."""
    file = root / "tests" / "equivalents.toml"
    rows = tomllib.loads(file.read_text("utf-8"))["equivalent"] if file.is_file() else []
    return {(row["path"], row["old"], row["new"]) for row in rows}


def candidates(root: Path, below: Sequence[str]) -> tuple[list[Mutant], dict[str, bytes]]:
    """All mutants of the product, or of some of its files and folders."""
    paths = [*product(root, ".py"), *product(root, ".toml")]
    wanted = [
        p for p in paths if not below or any(f"{p}/".startswith(f"{b.rstrip('/')}/") for b in below)
    ]
    sources = {path: (root / path).read_bytes() for path in wanted}
    return [m for path, source in sources.items() for m in mutants_of(path, source)], sources


# ---- Judging all


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        verdict: "killed", "survived", "not covered" by any test, or "left" when the time was over.
        by: the test that failed, where one did. ran: how many ran.
        tests: those chosen, the nearest first.
    """

    mutant: Mutant
    verdict: str
    by: str = ""
    ran: int = 0
    tests: tuple[str, ...] = ()

    @property
    def survived(self) -> bool:
        """Whether nothing noticed it."""
        return self.verdict in ("survived", "not covered")


def judge(root: Path, mutants: Sequence[Mutant], until: float) -> Iterator[Verdict]:
    """What becomes of each, as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary).resolve() / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "*_cache", "*.egg-info", "build", "dist")
        shutil.copytree(root, copy, symlinks=True, ignore=ignored)
        folder = root / "build" / "mutants"
        reach, missing = known_reach(copy, folder, {mutant.path for mutant in mutants})
        if missing:
            print(f"recording the lines that {len(missing)} files of tests run", file=sys.stderr)
            record(copy, missing, folder)
            reach, _ = known_reach(copy, folder, ())
        jobs, anew = [], []
        for number, (mutant, tests) in enumerate(
            zip(mutants, reach.chosen(copy, mutants), strict=True)
        ):
            seconds = sum(reach.seconds[test] for test in tests)
            job = Job(number=number, mutant=mutant, tests=tests, seconds=seconds)
            if not tests:
                yield Verdict(mutant=mutant, verdict="not covered")
            elif reach.at_import(mutant):
                anew.append(job)
            else:
                jobs.append(job)
        for job, answer in in_collected(copy, jobs, until) if jobs else ():
            if answer["verdict"] == "unpatched":
                anew.append(job)
            else:
                yield _verdict(job, answer)
        if anew:
            yield from _imported_anew(copy, anew, until)


def _verdict(job: Job, answer: Answer) -> Verdict:
    assert job.mutant is not None
    by = " ".join(answer["by"]) or "it did not end well"
    return Verdict(
        mutant=job.mutant,
        verdict=answer["verdict"],
        by=by if answer["verdict"] == "killed" else "",
        ran=answer["ran"],
        tests=job.tests,
    )


def _imported_anew(copy: Path, jobs: Sequence[Job], until: float) -> Iterator[Verdict]:
    """Judge by the nearest tests, then by the others where there are and none of those failed."""
    copies = InCopies(copy)
    first = [replace(job, tests=job.tests[:FIRST_TESTS], seconds=job.seconds + 10) for job in jobs]
    rest = {job.number: job.tests[FIRST_TESTS:] for job in jobs}
    later = []
    for job, answer in in_forks(first, copies.judged, until, copies.restored):
        if answer["verdict"] == "survived" and rest[job.number]:
            later.append(replace(job, tests=rest[job.number]))
        else:
            yield _verdict(job, answer)
    for job, answer in in_forks(later, copies.judged, until, copies.restored):
        yield _verdict(job, answer | {"ran": answer["ran"] + FIRST_TESTS})


def record(copy: Path, files: Sequence[str], folder: Path) -> None:
    """Run files of tests, and keep which lines each test runs."""
    recorded = copy.parent / "recorded"
    recorded.mkdir()

    def run() -> None:
        enter(copy, copy.parent / "recorded.out")
        recorder = Recorder(copy, recorded)
        options = ["-q", "-p", "no:cacheprovider"]
        if (copy / "tests" / "workers.py").is_file():
            options += ["--workers", str(WORKERS)]
        status = pytest.main([*options, *files], plugins=[recorder])
        sys.stdout.flush()
        os._exit(status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    fork = FORK.Process(target=run)
    fork.start()
    fork.join()
    if fork.exitcode:
        said = (copy.parent / "recorded.out").read_text("utf-8", errors="replace")
        raise RuntimeError(f"the tests could not be recorded: {said[-3000:]}")
    keep(copy, recorded, folder, files)


# ---- The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants, and say which survive."""
    parser = argparse.ArgumentParser(prog="scripts/test --mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders of the product")
    parser.add_argument("--since", metavar="COMMIT", help="only of lines that changed since then")
    parser.add_argument("--count", type=int, help="so many lines, one mutant of each")
    parser.add_argument("--seed", default="1", help="which ones (%(default)s)")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which none is begun")
    parser.add_argument("--json", action="store_true", help="all verdicts, on stdout")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root, until = options.root.resolve(), time.monotonic() + 60 * options.minutes
    found, sources = candidates(root, options.paths)
    since = options.since
    if since is None and not options.paths and options.count is None:
        since = landed(root)
        if since is None:
            print("This clone holds one commit alone, so nothing says what changed.")
            print("  fix: fetch the one before (git fetch --deepen 1), or name files or --count")
            return 0
    if since is not None:
        if not git(root, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
            parser.error(f"--since {since}: this clone has no such commit; fetch it first")
        lines = changed_lines(root, since)
        found = [m for m in found if lines[m.path].intersection(m.lines(sources[m.path]))]
    if options.count is not None:
        found = sampled(found, sources, options.count, options.seed)
    else:
        found = [mutant for mutant in found if mutant.parses(sources[mutant.path])]
    equivalent = listed(root)
    chosen = [m for m in found if (m.path, m.old, m.new) not in equivalent]
    print(
        f"{len(chosen)} mutants, {len(found) - len(chosen)} listed as equivalent", file=sys.stderr
    )
    verdicts = []
    for verdict in judge(root, chosen, until) if chosen else ():
        verdicts.append(verdict)
        if verdict.survived:
            print(survivor(verdict), file=sys.stderr if options.json else sys.stdout, flush=True)
    said = summary(verdicts, options.seed if options.count else None)
    if options.json:
        print(json.dumps(document(verdicts, options.seed), indent=1))
    print(said, file=sys.stderr if options.json else sys.stdout)
    return 3 if any(verdict.survived for verdict in verdicts) else 0


def survivor(verdict: Verdict) -> str:
    """A survivor as a reader wants it: its place, what changes, and who did not notice."""
    mutant = verdict.mutant
    tests = ", ".join(verdict.tests[:3]) + (", ..." if len(verdict.tests) > 3 else "")
    return (
        f"{mutant.path}:{mutant.line}: {mutant.operator}\n"
        f"  - {mutant.old[:160]}\n  + {mutant.new[:160]}\n"
        f"  {f'{verdict.ran} tests ran it: {tests}' if tests else 'no test runs it'}"
    )


def summary(verdicts: Sequence[Verdict], seed: str | None) -> str:
    """Counts by room and by operator."""
    lines = []
    for title, key in (("room", room_of), ("operator", lambda v: v.mutant.operator)):
        lines.append(f"{title:28} killed survived not covered  left")
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for verdict in verdicts:
            counts[key(verdict)][verdict.verdict] += 1
        for name, count in sorted(counts.items()):
            kinds = ("killed", "survived", "not covered", "left")
            lines.append(f"{name:28} " + "".join(f"{count[kind]:>9}" for kind in kinds))
    judged = [verdict for verdict in verdicts if verdict.verdict != "left"]
    survived = sum(verdict.survived for verdict in judged)
    drawn = f" (seed {seed})" if seed is not None else ""
    lines.append(f"{survived} of {len(judged)} mutants survived{drawn}")
    return "\n".join(lines)


def room_of(verdict: Verdict) -> str:
    """The folder of a mutant."""
    return Path(verdict.mutant.path).parent.as_posix()


def document(verdicts: Sequence[Verdict], seed: str) -> dict[str, Any]:
    """All verdicts as JSON."""
    return {
        "seed": seed,
        "mutants": [
            {
                "path": verdict.mutant.path,
                "line": verdict.mutant.line,
                "operator": verdict.mutant.operator,
                "old": verdict.mutant.old,
                "new": verdict.mutant.new,
                "verdict": verdict.verdict,
                "by": verdict.by,
                "ran": verdict.ran,
                "tests": verdict.tests,
            }
            for verdict in verdicts
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
