"""A command in a separate process: what it took, and what it printed."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from draftquant.recipes.errors import DraftQuantError

STDERR_LINES = 5
_BETWEEN = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
wall = time.perf_counter() - began
with open(sys.argv[1], "w") as file:
    print(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A small process in between: a child's peak includes what its parent held when it began."""


class BenchError(DraftQuantError):
    """What should be measured cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a process took.

    Attributes:
        wall_seconds: of the command. cpu_seconds: of all cores together, the same on a busy
            machine.
        peak_bytes: resident memory.
        status: with which it ended. stdout, last_lines: what it printed, and of stderr the last.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    status: int
    stdout: str
    last_lines: tuple[str, ...]

    @property
    def error(self) -> str:
        """Its last words before the fix; "" where it succeeded."""
        if self.status == 0:
            return ""
        said = [line for line in self.last_lines if line.strip() and "fix: " not in line]
        return said[-1].strip() if said else f"ended with status {self.status}"


def run_measured(*command: str) -> Taken:
    """Run a command in a process of its own, whatever its status."""
    with (
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.NamedTemporaryFile() as usage,
    ):
        between = (sys.executable, "-c", _BETWEEN, usage.name, *command)
        status = subprocess.run(between, stdout=stdout, stderr=stderr, check=False).returncode
        wall, cpu, peak = usage.read().split()
        return Taken(
            wall_seconds=float(wall),
            cpu_seconds=float(cpu),
            peak_bytes=int(peak),
            status=status,
            stdout=_text(stdout),
            last_lines=tuple(_text(stderr).strip().splitlines()[-STDERR_LINES:]),
        )


def draftquant(*arguments: str, judged: tuple[int, ...] = (0,)) -> Taken:
    """Run a command of draftquant."""
    taken = run_measured(sys.executable, "-m", "draftquant", *arguments)
    if taken.status not in judged:
        fix = "use another WORKDIR"
        raise BenchError(arguments[0], "failed", details=taken.last_lines, fix=fix)
    return taken


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")
