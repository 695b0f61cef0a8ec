"""Faults of one line, each of which the tests must catch: `./scripts/test --faults [NAME...]`.

The faults are data (*.toml beside this file). Each is applied to a copy of the tree, never to the
tree itself, and the tests that are to catch it are run there; the one that fails must pass without
the fault. Exit code 0: all are caught; 1: one survives, or cannot be judged.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 600  # of one run of tests: a fault may never end
_FAILED = 1  # pytest: tests ran, and some failed
Verdict = Literal["caught", "SURVIVED", "does not apply", "cannot tell"]


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
    replacement: str
    harm: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str | None:
        """Why it cannot be applied to the tree at `root`, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.text) if path.is_file() else 0
        return None if count == 1 else f"its text stands {count} times in {self.file}"


def read_faults() -> tuple[Fault, ...]:
    """All faults, in the order of the files and of their lines."""
    return tuple(
        Fault(**{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    )


class Scratch:
    """A copy of the tree whose packages are the ones that tests in it import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(ROOT, root, ignore=ignored, dirs_exist_ok=True)
        installed = root / ".package"
        shutil.copytree(ROOT / ".package", installed, symlinks=True)
        self._environment = os.environ | {
            "PYTHONPATH": str(installed),
            "PYTHONDONTWRITEBYTECODE": "1",  # two versions of a file within a second look alike
            "DRAFTQUANT_REQUIRE_VENDORS": "1",
        }
        self._check_imports()

    def _check_imports(self) -> None:
        """An installed draftquant must not hide the copy."""
        script = "import draftquant.quantize; print(draftquant.quantize.__file__)"
        command = [sys.executable, "-P", "-c", script]
        found = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=True
        )
        if not Path(found.stdout.strip()).is_relative_to(self.root):
            raise SystemExit(f"tests in {self.root} would import {found.stdout.strip()}")

    def run(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
        """Run tests until one fails; None where they do not end."""
        pytest = Path(sys.executable).with_name("pytest")
        command = [pytest, "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None

    def verdict(self, fault: Fault) -> tuple[Verdict, str]:
        """Apply a fault, run its tests, take it back; with what there is to say."""
        problem = fault.problem(self.root)
        if problem is not None:
            return "does not apply", problem
        path = self.root / fault.file
        right = path.read_text(encoding="utf-8")
        path.write_text(right.replace(fault.text, fault.replacement), encoding="utf-8")
        try:
            result = self.run([f"tests/{test}" for test in fault.tests])
        finally:
            path.write_text(right, encoding="utf-8")
        if result is None:
            return "caught", "the tests did not end"
        if result.returncode == 0:
            return "SURVIVED", fault.harm
        failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED ")]
        if result.returncode != _FAILED or not failed:
            return "cannot tell", f"pytest ended with {result.returncode}: {result.stdout[-500:]}"
        test = failed[0].removeprefix("FAILED ").partition(" - ")[0]
        again = self.run([test])
        if again is None or again.returncode:
            return "cannot tell", f"{test} fails without the fault too"
        return "caught", test


def main() -> int:
    """Judge all faults, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all without any")
    names = parser.parse_args().names
    faults = read_faults()
    unknown = sorted(set(names) - {fault.name for fault in faults})
    if unknown:
        parser.error(f"no fault {unknown[0]!r}")
    chosen = [fault for fault in faults if not names or fault.name in names]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        scratch = Scratch(Path(folder))
        found = [_judged(scratch, fault) for fault in chosen]
    print(f"{found.count('caught')} of {len(found)} faults caught")
    return int(any(verdict != "caught" for verdict in found))


def _judged(scratch: Scratch, fault: Fault) -> Verdict:
    start = time.monotonic()
    verdict, detail = scratch.verdict(fault)
    print(f"{verdict:14} {fault.name:36} {time.monotonic() - start:5.1f} s  {detail}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
