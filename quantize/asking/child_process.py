"""The engine's interpreter as a child process: its time, its ends, and nothing left behind."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...recipes.errors import DeviceError
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import parse_object

REQUEST, ANSWER = "request.json", "answer.jsonl"
_CHILD = (
    "import sys; sys.path.insert(0, {!r}); from inside.answer import main; del sys.path[0];"
    " main({!r})"
)
_TAIL = 2000  # bytes of what the engine printed last
Answer = Mapping[str, Any]


def run_child(python: str, work: Path, seconds: int) -> Answer:
    """All that the child said, the last value of each key."""
    code = _CHILD.format(str(Path(__file__).parent), str(work / REQUEST))
    log = work / "log"
    with log.open("wb") as stream, _process([python, "-c", code], work, stream) as child:
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
    answer, where, printed = read_answer(work), f"--ask {python}", _tail(log)
    if status is None:
        raise DeviceError(
            where,
            f"expected an answer within {seconds} s, got none ({answer['stage']})",
            fix="give it more time (--ask-seconds), or see what it printed last",
            details=printed,
        )
    if status:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise DeviceError(
            where,
            f"expected an answer, and the process ended with {how} ({answer['stage']})",
            fix="see what it printed last, and whether the engine itself starts there",
            details=printed,
        )
    return {**answer, "printed": printed}


def read_answer(work: Path) -> dict[str, Any]:
    """The last value of each key; a line that was not finished does not count."""
    answer: dict[str, Any] = {"stage": "start"}
    with suppress(FileNotFoundError):
        for line in read_text(work / ANSWER).rpartition("\n")[0].splitlines():
            answer |= parse_object(line)
    return answer


@contextmanager
def _process(command: list[str], cwd: Path, log: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A child in a group of its own, of which nothing is left behind."""
    try:
        child = subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    except OSError as exc:
        raise DeviceError(
            f"--ask {command[0]}",
            f"expected a Python interpreter, got: {exc.strerror}",
            fix="give the python of the engine's environment, such as .venv/bin/python",
        ) from exc
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _tail(log: Path) -> list[str]:
    with open_stream(log) as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL))
        text = stream.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-12:]
