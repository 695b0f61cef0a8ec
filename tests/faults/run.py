"""Faults of one line, each of which the tests must catch: `./scripts/test --faults [NAME...]`.

The faults are data (*.toml beside this file): such as --mutants does not make, of files and their
order, of values that are taken for others. Each is applied to a copy of the tree, never to the
tree itself, and the tests that are to catch it are run there, in a fork of a process that has
imported torch; the tests that fail must pass without the faults. Exit code 0: all are caught; 1:
one survives, or cannot be judged.
"""

import argparse
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from draftquant.scripts.dev.mutants.judging import SAID, failed_in, run_pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 600  # of one run of tests: a fault may never end
FORK = multiprocessing.get_context("fork")
Verdict = Literal["caught", "SURVIVED", "does not apply", "cannot tell"]
Found = tuple[Verdict, str]
"""With the first test that failed, or what there is to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line written as a tired engineer might write it.

    Attributes:
        file: relative to the root. text: stands in it exactly once; replaced by `replacement`.
        harm: what it would do to a user.
        tests: files below tests/ of which one must fail.
    """

    name: str
    file: str
    text: str
    replacement: str = ""
    harm: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Why it cannot be applied to the tree at `root`, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.text) if path.is_file() else 0
        return None if count == 1 else f"its text stands {count} times in {self.file}"


def read_faults() -> tuple[Fault, ...]:
    """All faults, in the order of the files: by what must catch them, and where they are."""
    return tuple(
        Fault(name=name, file=file, tests=(f"{test}.py", *entry.pop("also", ())), **entry)
        for path in sorted(HERE.glob("*.toml"))
        for test, files in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for file, entries in files.items()
        for name, entry in entries.items()
    )


class Scratch:
    """A copy of the tree whose packages are the ones that tests in it import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist")
        shutil.copytree(ROOT, root, ignore=ignored, dirs_exist_ok=True)
        shutil.copytree(ROOT / ".package", root / ".package", symlinks=True)

    def run(self, tests: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run tests until one fails: pytest's exit code, None where they do not end; who failed."""
        process = FORK.Process(target=run_in, args=(self.root, tests))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None, []
        return process.exitcode, failed_in(self.root)

    def verdict(self, fault: Fault) -> tuple[Verdict, str]:
        """Apply a fault, run its tests, take it back; with what there is to say."""
        problem = fault.problem(self.root)
        if problem is not None:
            return "does not apply", problem
        path = self.root / fault.file
        right, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(right.replace(fault.text, fault.replacement), encoding="utf-8")
        try:
            status, failed = self.run([f"tests/{test}" for test in fault.tests])
        finally:
            path.write_text(right, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its bytecode holds again
        if status is None:
            return "caught", "the tests did not end"
        if status == pytest.ExitCode.OK:
            return "SURVIVED", fault.harm
        if status != pytest.ExitCode.TESTS_FAILED or not failed:
            said = self.root.with_suffix(SAID).read_text("utf-8", "replace")
            return "cannot tell", f"pytest ended with {status}: {said[-3000:]}"
        return "caught", failed[0]


def run_in(root: Path, tests: Sequence[str]) -> None:
    """In a process of its own: run tests in a copy of the tree, and exit with pytest's code."""
    os.setpgid(0, 0)
    raise SystemExit(run_pytest(root, ["-x", *tests]))


def judged(folder: Path, fault: Fault) -> Found:
    """Judge a fault in this process's copy of the tree."""
    start = time.monotonic()
    verdict, detail = own_scratch(folder).verdict(fault)
    print(f"{verdict:14} {fault.name:44} {time.monotonic() - start:5.1f} s  {detail}", flush=True)
    return verdict, detail


@functools.cache
def own_scratch(folder: Path) -> Scratch:
    """The copy of the tree that this process has, beside those of the others."""
    return Scratch(folder / str(os.getpid()))


def main() -> int:
    """Judge all faults, or those named."""
    parser = argparse.ArgumentParser(description="Faults that tests must catch.")
    parser.add_argument("names", nargs="*", help="faults; all without any")
    names = parser.parse_args().names
    faults = read_faults()
    unknown = sorted(set(names) - {fault.name for fault in faults})
    if unknown:
        parser.error(f"no fault {unknown[0]!r}")
    import torch  # noqa: F401 - every fork has it
    import transformers  # noqa: F401

    chosen = [fault for fault in faults if not names or fault.name in names]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        in_own_copy = functools.partial(judged, Path(folder))
        with ProcessPoolExecutor(os.cpu_count(), mp_context=FORK) as each_core:
            found = list(each_core.map(in_own_copy, chosen))
        caught = {test for verdict, test in found if verdict == "caught" and "::" in test}
        status, failed = own_scratch(Path(folder)).run(sorted(caught)) if caught else (0, [])
    print(f"{sum(verdict == 'caught' for verdict, _ in found)} of {len(found)} faults caught")
    if status:
        print(f"without the faults pytest ends with {status}: {' '.join(failed)}")
    return int(bool(status) or any(verdict != "caught" for verdict, _ in found))


if __name__ == "__main__":
    sys.exit(main())
