"""A server's processes: started with a log beside, and ended with all that they started.

Servers start workers, which give themselves other names and groups, and hold GPUs: one that is left
over spoils whatever is measured next. So all processes of the server's session are found in /proc,
and all that carry its mark in their environment; and a guard beside ends them should this process
be killed. Run as a module, this is that guard.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import DraftQuantError, short
from ...recipes.regular_file import open_kept, open_stream
from ..errors import MeasureError

MARK = "DRAFTQUANT_LAUNCHED"
"""The variable that a server's processes inherit, whatever session they go to."""
NUM_ERROR_LINES, NUM_LAST_LINES = 5, 10
_LAST_BYTES, _LONGEST_LINE = 2**20, 300
_EXCEPTION = re.compile(r"\b\w+(Error|Exception)\b.*")
_POLL = 0.05
_SECONDS_TO_DIE = 30.0
"""After SIGKILL: memory of GPUs is given back before a process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that was started.

    Attributes:
        name: for people. log: the file with all that it says. process: that was started.
        mark: see `MARK`.
    """

    name: str
    log: Path
    process: "subprocess.Popen[bytes]"
    mark: str

    def check_alive(self, seconds: float = 0, after: DraftQuantError | None = None) -> None:
        """Nothing, as long as it runs, and for so many seconds more.

        Args:
            seconds: to wait for its end.
            after: what its client met before.

        Raises:
            MeasureError: it ended; with its last words.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if (status := self.process.returncode) is not None:
            how = (
                f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
            )
            raise self.error(f"the server {how}", after)

    def error(self, what: str, after: DraftQuantError | None = None) -> MeasureError:
        """An error with what the server answered before it, and what its log says of it."""
        answered = [] if after is None else [f"  its client: {after.what}", *after.details]
        return MeasureError(
            self.name,
            f"{what}; its log:",
            details=[*answered, *(f"  {line}" for line in telling_lines(self.log))],
            fix=f"see {self.log}; what was measured is kept, so run the same command again",
        )


@contextmanager
def running_server(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    stop_seconds: float,
) -> Iterator[Server]:
    """Start a server; leaving the block, however, ends all its processes.

    They get SIGTERM, and after `stop_seconds` SIGKILL. Should this process be killed itself, the
    guard does the same.

    Args:
        name: for messages.
        command: words, not run by a shell.
        environment: variables beside those of this process.
        log: file that gets what it says, behind what is there.
        stop_seconds: given to end by themselves.

    Raises:
        MeasureError: it cannot be started, or processes of it survive SIGKILL.
    """
    mark = uuid.uuid4().hex
    descriptor = open_kept(log)
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, MARK: mark},
            start_new_session=True,  # Ctrl-C of the terminal is ours: it ends servers in order
        )
    except OSError as exc:
        raise MeasureError(name, f"{short(command[0])} cannot be started: {exc.strerror or exc}",
                           fix="correct 'command:' of the matrix") from exc  # fmt: skip
    finally:
        os.close(descriptor)
    server = Server(name=name, log=log, process=process, mark=mark)
    with _guard(process.pid, mark, stop_seconds):
        try:
            yield server
        finally:
            _stop(server, stop_seconds)


@contextmanager
def _guard(session: int, mark: str, stop_seconds: float) -> Iterator[None]:
    """A process that ends the server's when the pipe from this one closes, however it does.

    After the block nothing is left for it; unless this process was killed, or Ctrl-C was pressed
    again while it waited for the server's end.
    """
    guard = subprocess.Popen(
        # -P: whatever folder this is started in, no module is taken from it.
        [sys.executable, "-P", "-m", __name__, str(session), mark, f"{stop_seconds:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()


def _stop(server: Server, stop_seconds: float) -> None:
    left = end_processes(server.process.pid, server.mark, stop_seconds, reap=server.process.poll)
    if left:
        raise MeasureError(
            server.name,
            f"{len(left)} process(es) survive SIGKILL: {', '.join(map(str, left))}",
            fix="a driver holds them: see dmesg, and restart the machine",
        )


def end_processes(
    session: int, mark: str, stop_seconds: float, *, reap: Callable[[], object] = lambda: None
) -> tuple[int, ...]:
    """End all processes of a server, gently and then not.

    Args:
        session: id of the session that the server was started in, its first process.
        mark: see `MARK`.
        stop_seconds: between SIGTERM and SIGKILL.
        reap: called while waiting, by the parent of the first process.

    Returns:
        Ids of those that are left.
    """
    for number, seconds in ((signal.SIGTERM, stop_seconds), (signal.SIGKILL, _SECONDS_TO_DIE)):
        deadline = time.monotonic() + seconds
        told: set[int] = set()
        while True:
            reap()
            left = server_processes(session, mark)
            if not left:
                return ()
            for pid in left:
                if pid not in told:  # SIGTERM twice makes some servers drop what they clean up
                    told.add(pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
    return tuple(left)


def server_processes(session: int, mark: str) -> tuple[int, ...]:
    """Ids of the living processes of a server.

    A worker that rewrites its title overwrites its environment in /proc (setproctitle, which vLLM
    and SGLang use), and stays in the session; one that leaves the session has the environment.
    """
    sign = f"{MARK}={mark}".encode()
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return tuple(sorted(pid for pid in pids if _is_of(pid, session, sign)))


def _is_of(pid: int, session: int, sign: bytes) -> bool:
    try:
        with open_stream(Path(f"/proc/{pid}/stat")) as stream:
            # Behind the name, which may hold anything: state, parent, group, session.
            state, _, _, of_session = stream.read().rpartition(b")")[2].split()[:4]
        if state in b"ZX":
            return False
        if int(of_session) == session:
            return True
        with open_stream(Path(f"/proc/{pid}/environ")) as stream:
            return sign in stream.read().split(b"\0")
    except (OSError, ValueError):  # it ended meanwhile, or is another user's
        return False


def telling_lines(log: Path) -> list[str]:
    """The first lines of a log's end that tell of an error, and its last lines.

    An engine that ends itself in order says why long before its last line: in the line that names
    an exception, and not in the many of a traceback that are logged as errors too. What stands
    there twice is told once. Blank lines are left out; "(nothing)" where there are no others.
    """
    try:
        with open_stream(log) as stream:
            stream.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = stream.read(_LAST_BYTES).decode("utf-8", errors="replace")
    except OSError as exc:
        return [f"(cannot be read: {exc})"]
    lines = [line.rstrip()[:_LONGEST_LINE] for line in text.splitlines() if line.strip()]
    before, last = lines[:-NUM_LAST_LINES], lines[-NUM_LAST_LINES:]
    named = {found[0]: line for line in reversed(before) if (found := _EXCEPTION.search(line))}
    errors = list(reversed(named.values())) or [line for line in before if "error" in line.lower()]
    return [*errors[:NUM_ERROR_LINES], *(["…"] if before else []), *last] or ["(nothing)"]


def wait_for_free_port(host: str, port: int, seconds: float) -> None:
    """Wait until a server can listen there.

    Raises:
        MeasureError: after so many seconds something else still does, or the host is not ours.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family):
                return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise MeasureError(
                    f"{host}:{port}",
                    f"no server can listen there: {exc.strerror or exc}",
                    fix="end what listens there (ss -ltnp), or change 'port:' of the matrix",
                ) from exc
        time.sleep(_POLL)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # to its end, which is the end of the parent's wish for a server
    end_processes(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
