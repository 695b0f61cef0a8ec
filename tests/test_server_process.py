"""Processes of a server: started, found, and ended with all that they started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from draftquant.validate.errors import MeasureError
from draftquant.validate.launch.server_process import (
    MARK,
    running_server,
    server_processes,
    telling_lines,
    wait_for_free_port,
)

ENGINE = Path(__file__).parent / "launched_engine.py"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ENGINE), "--port", str(free_port()), *arguments]


def wait_until(true: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def children_in(log: Path) -> list[int]:
    wait_until(lambda: "loading" in log.read_text(encoding="utf-8"))
    line = next(
        line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("children")
    )
    return [int(word) for word in line.split()[1:]]


def test_a_server_runs_with_its_log_and_environment_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", "the shell's, which the matrix overrules")
    log = tmp_path / "server.log"
    words = [sys.executable, "-c", "import os, time; print(os.environ['A'], flush=True); "
             "time.sleep(600)"]  # fmt: skip
    with running_server("bf16", words, environment={"A": "b"}, log=log, stop_seconds=20) as server:
        wait_until(lambda: log.read_text(encoding="utf-8") == "b\n")
        server.check_alive()
        pid = server.process.pid
        assert server_processes(pid, server.mark) == (pid,)
        assert os.getsid(pid) == pid != os.getsid(0)
    assert is_gone(pid)
    assert server.process.returncode == -signal.SIGTERM
    assert MARK not in os.environ


def test_children_and_those_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    words = command("--children", "--deaf")
    with running_server("a", words, environment={}, log=log, stop_seconds=0.3) as server:
        children = children_in(log)
        assert set(children) < set(server_processes(server.process.pid, server.mark))
        began = time.monotonic()
    assert all(is_gone(pid) for pid in (*children, server.process.pid))
    assert server.process.returncode == -signal.SIGKILL  # after SIGTERM was not heard
    assert time.monotonic() - began >= 0.3


def test_a_server_that_left_children_and_died_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    words = command("--children", "--dies")
    with running_server("a", words, environment={}, log=log, stop_seconds=0.2) as server:
        children = children_in(log)
        server.process.wait()
        with pytest.raises(MeasureError, match="ended with status 3") as caught:
            server.check_alive()
    assert all(is_gone(pid) for pid in children)
    assert caught.value.details[-1] == r"  \x1b[31mno such draft\x1b[0m"
    assert str(log) in caught.value.fix


def test_a_server_that_was_killed_says_by_what(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_server("a", command(), environment={}, log=log, stop_seconds=5) as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(MeasureError, match=r"a: the server was killed by signal 9"):
            server.check_alive()


def test_an_error_in_the_block_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(KeyboardInterrupt),
        running_server("a", command(), environment={}, log=log, stop_seconds=5) as server,
    ):
        raise KeyboardInterrupt
    assert is_gone(server.process.pid)


LAUNCHER = """
import signal, sys, time
from pathlib import Path
from draftquant.validate.launch.server_process import running_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # which nohup and & take away
log, words = Path(sys.argv[1]), sys.argv[2:]
with running_server("a", words, environment={}, log=log, stop_seconds=0.3) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_we_are_killed(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = command("--children", "--deaf")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(log), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    children = children_in(log)
    assert not any(is_gone(pid) for pid in (server, *children))
    launcher.send_signal(number)
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in (server, *children)))


def test_a_program_that_is_none_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = running_server("a", ["/none/x"], environment={}, log=log, stop_seconds=1)
    with pytest.raises(MeasureError, match=r"'/none/x' cannot be started: No such file"), context:
        pass


def test_what_a_log_holds_stays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("kept\n", encoding="utf-8")
    with running_server("a", command(), environment={}, log=log, stop_seconds=5):
        wait_until(lambda: log.read_text(encoding="utf-8") == "kept\nloading\n")


def test_what_a_log_tells(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "No such file" in telling_lines(log)[0]
    log.write_text("", encoding="utf-8")
    assert telling_lines(log) == ["(nothing)"]
    log.write_text("a\n\nerror b\n", encoding="utf-8")
    assert telling_lines(log) == ["a", "error b"]
    lines = [b"old error", b"x" * 2**20, *(b"RuntimeError: %d" % i for i in range(7)), b""]
    log.write_bytes(b"\n".join([*lines, *(b"%d " % i for i in range(40)), b"\xff"]))
    assert telling_lines(log) == [
        *(f"RuntimeError: {i}" for i in range(5)), "…", *map(str, range(31, 40)), "\ufffd"
    ]  # fmt: skip


def test_the_exception_is_told_and_not_the_lines_around_it(tmp_path: Path) -> None:
    """As vLLM writes it: each line of a traceback is one of level ERROR, and each process tells."""
    log = tmp_path / "log"
    traceback = [f"(EngineCore pid=7) ERROR [core.py:{i}] File x, line {i}" for i in range(9)]
    cause = "AttributeError: '_OpNamespace' object has no attribute 'cpu_gemm_wna16'"
    told = [
        f"(EngineCore pid=7) ERROR [core.py:9] {cause}",
        f"{cause}",
        "EngineDeadError: see above",
    ]
    after = [f"INFO: shutting down {i}" for i in range(12)]
    log.write_text("\n".join([*traceback, *told, *after]), encoding="utf-8")
    assert telling_lines(log) == [told[0], told[2], "…", *after[2:]]


def test_a_port_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(MeasureError, match=rf"127\.0\.0\.1:{port}: no server can listen there"):
            wait_for_free_port("127.0.0.1", port, 0.1)
    wait_for_free_port("127.0.0.1", port, 0)
    with pytest.raises(MeasureError, match="no server can listen there"):
        wait_for_free_port("no.such.host.invalid", port, 0)
