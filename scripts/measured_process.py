"""A command in a process of its own: what it took, and what it printed."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass

from ..recipes.errors import DraftQuantError

STDERR_LINES = 5
_MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with open(sys.argv[1], "w") as file:
    print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A process between, which is small: a child's peak counts what its parent held when it began."""


class BenchError(DraftQuantError):
    """What is to be measured cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a process took.

    Attributes:
        cpu_seconds: of all cores together, the same on a busy machine.
        peak_bytes: resident memory.
    """

    cpu_seconds: float
    peak_bytes: int


def measured(what: str, *arguments: str) -> tuple[Taken, str]:
    """Run this Python with arguments.

    Args:
        what: named where it fails.
        arguments: of the interpreter.

    Returns:
        What it took, and its stdout.

    Raises:
        BenchError: it failed; with its last lines.
    """
    with (
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as errors,
        tempfile.NamedTemporaryFile() as usage,
    ):
        command = (sys.executable, "-c", _MEASURED, usage.name, sys.executable, *arguments)
        status = subprocess.run(command, stdout=stdout, stderr=errors, check=False).returncode
        taken = usage.read().split()
        stdout.seek(0)
        errors.seek(0)
        printed, said = stdout.read().decode(), errors.read().decode(errors="replace")
    if status:
        details = said.strip().splitlines()[-STDERR_LINES:]
        raise BenchError(what, "failed", details=details, fix="use another WORKDIR")
    return Taken(cpu_seconds=float(taken[0]), peak_bytes=int(taken[1])), printed
