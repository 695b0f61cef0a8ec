"""A matrix of servers, run: real processes that answer, die, hang and are killed."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.errors import ServerError
from draftquant.quantize.errors import OutputError
from draftquant.validate.errors import MeasureError
from draftquant.validate.launch import launch
from draftquant.validate.launch.launch import Cell, Folder, launch_matrix
from draftquant.validate.launch.matrix import Matrix, Variant
from test_server_process import ENGINE, free_port

NONE = Variant(name="none", environment={"SAID": "one"})
BF16 = Variant(name="bf16", draft="/drafts/b", arguments="--draft {draft}")


def matrix_of(*variants: Variant, **keys: Any) -> Matrix:
    words = f"{sys.executable} {ENGINE} --port {{port}}"
    return Matrix(
        **{
            "engine": "vllm",
            "target": "target",
            "prompts": "prompts.jsonl",
            "max_new_tokens": 8,
            "command": words,
            "environment": {"SAID": "all"},
            "port": free_port(),
            "variants": variants or (NONE, BF16),
            "concurrencies": (1, 4),
            "repeats": 2,
            "start_seconds": 600,
            "stop_seconds": 5,
            **keys,
        }
    )


class Measuring:
    """Runs a matrix; each measurement is what the server says of itself."""

    def __init__(self, matrix: Matrix, out: Path) -> None:
        self.matrix, self.folder = matrix, Folder(path=out)
        self.done: list[str] = []
        self.said: list[str] = []
        self.first_answer: Callable[[], None] = lambda: None
        self.before: Callable[[Cell], None] = lambda _: None

    async def ready(self, variant: Variant) -> None:
        self.done.append(f"ready {variant.name}")
        self.first_answer()

    def measure(self, cell: Cell, path: Path) -> None:
        self.before(cell)
        with urllib.request.urlopen(f"{self.matrix.url}/who") as answer:
            path.write_bytes(answer.read())
        self.done.append(cell.name)

    def run(self, **plan: str) -> None:
        launch_matrix(
            self.matrix,
            self.folder,
            plan=dict(plan),
            ready=self.ready,
            measure=self.measure,
            on_progress=self.said.append,
        )

    def measured(self) -> dict[str, str]:
        found = (self.folder.path / "measurements").iterdir()
        return {path.stem: path.read_text(encoding="utf-8") for path in found}


def test_variants_take_turns_and_each_is_measured_at_every_concurrency(tmp_path: Path) -> None:
    measuring = Measuring(matrix_of(), tmp_path / "out")
    measuring.run()
    assert measuring.done == [
        "ready none", "none.c1.r1", "none.c4.r1", "ready bf16", "bf16.c1.r1", "bf16.c4.r1",
        "ready none", "none.c1.r2", "none.c4.r2", "ready bf16", "bf16.c1.r2", "bf16.c4.r2",
    ]  # fmt: skip
    assert measuring.measured() == {
        f"{name}.c{concurrency}.r{repeat}": said
        for name, said in (("none", "one "), ("bf16", "all --draft /drafts/b"))
        for concurrency in (1, 4)
        for repeat in (1, 2)
    }
    logs = sorted((tmp_path / "out" / "logs").iterdir())
    assert [log.name for log in logs] == [
        "bf16.r1.1.log", "bf16.r2.1.log", "none.r1.1.log", "none.r2.1.log"
    ]  # fmt: skip
    assert logs[0].read_text(encoding="utf-8").splitlines()[-1] == "asked /who"
    assert measuring.said[0] == (
        f"none, repeat 1 of 2: the server starts, its log is {tmp_path}/out/logs/none.r1.1.log"
    )
    measuring.done.clear()
    measuring.run()  # all is there: no server starts
    assert measuring.done == []


def test_a_slow_server_is_waited_for_and_a_hanging_one_not(tmp_path: Path) -> None:
    slow = Variant(name="slow", arguments="--seconds 1")
    measuring = Measuring(matrix_of(slow, repeats=1), tmp_path / "slow")
    measuring.run()
    assert measuring.done == ["ready slow", "slow.c1.r1", "slow.c4.r1"]
    hanging = matrix_of(Variant(name="hangs", arguments="--never"), start_seconds=4)
    with pytest.raises(MeasureError, match="hangs: was not ready after 4 seconds") as caught:
        Measuring(hanging, tmp_path / "hangs").run()
    assert caught.value.details == ("  loading",)


def test_a_server_that_dies_before_it_is_ready_is_quoted(tmp_path: Path) -> None:
    matrix = matrix_of(NONE, Variant(name="bad", draft="d", arguments="--draft {draft} --dies"))
    measuring = Measuring(matrix, tmp_path / "out")
    with pytest.raises(MeasureError, match="bad: the server ended with status 3") as caught:
        measuring.run()
    assert caught.value.details[-1] == r"  \x1b[31mno such draft\x1b[0m"
    assert "bad.r1.1.log" in caught.value.fix
    assert set(measuring.measured()) == {"none.c1.r1", "none.c4.r1"}


def test_a_server_that_dies_while_it_is_measured_keeps_what_was_measured(tmp_path: Path) -> None:
    measuring = Measuring(matrix_of(NONE), tmp_path / "out")

    def die(cell: Cell) -> None:
        if cell.concurrency == 4:
            with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
                urllib.request.urlopen(f"{measuring.matrix.url}/die").read()
            said = ["  attempt 1: 500 from /v1/completions: 'EngineDeadError'"]
            raise ServerError(measuring.matrix.url, "no answer", details=said, fix="see the server")

    measuring.before = die
    with pytest.raises(MeasureError, match="the server ended with status 7") as caught:
        measuring.run()
    assert caught.value.details[:2] == (
        "  its client: no answer",
        "  attempt 1: 500 from /v1/completions: 'EngineDeadError'",
    )
    assert caught.value.details[-1] == "  the engine met an error"
    assert set(measuring.measured()) == {"none.c1.r1"}
    measuring.before, measuring.done = lambda _: None, []
    measuring.run()
    assert measuring.done == ["ready none", "none.c4.r1", "ready none", "none.c1.r2", "none.c4.r2"]
    assert (tmp_path / "out" / "logs" / "none.r1.2.log").exists()


def test_what_the_server_answers_is_the_error_while_it_lives(tmp_path: Path) -> None:
    measuring = Measuring(matrix_of(), tmp_path / "out")

    def refuse() -> None:
        raise MeasureError("the server", "is another engine", fix="correct engine:")

    measuring.first_answer = refuse
    with pytest.raises(MeasureError, match="the server: is another engine"):
        measuring.run()
    assert measuring.done == ["ready none"]


def test_a_server_that_answers_no_more_and_lives_is_quoted(tmp_path: Path) -> None:
    """Its engine may be dead while its front door says 200."""
    measuring = Measuring(matrix_of(), tmp_path / "out")

    def silent() -> None:
        raise ServerError("http://x", "no answer after 6 attempt(s): 500", fix="see")

    measuring.first_answer = silent
    with pytest.raises(MeasureError, match="none: the server does not answer; its log") as caught:
        measuring.run()
    assert caught.value.details[0] == "  its client: no answer after 6 attempt(s): 500"
    assert "  loading" in caught.value.details


def test_more_repeats_go_on_and_another_matrix_is_refused(tmp_path: Path) -> None:
    port = free_port()
    Measuring(matrix_of(NONE, repeats=1, concurrencies=(1,), port=port), tmp_path / "out").run()
    more = Measuring(matrix_of(NONE, repeats=2, concurrencies=(1, 2)), tmp_path / "out")
    more.run()
    assert more.done == ["ready none", "none.c2.r1", "ready none", "none.c1.r2", "none.c2.r2"]
    other = Measuring(matrix_of(NONE, max_new_tokens=9), tmp_path / "out")
    with pytest.raises(OutputError, match="holds an unfinished matrix") as caught:
        other.run()
    assert caught.value.details == ("  max_new_tokens: it was 8, now it is 9",)
    with pytest.raises(OutputError, match="prompts_sha256: it was None, now it is 'a'"):
        Measuring(matrix_of(NONE), tmp_path / "out").run(prompts_sha256="a")


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SECONDS_TO_KILL", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        measuring = Measuring(matrix_of(port=port, stop_seconds=1), tmp_path / "out")
        with pytest.raises(MeasureError, match=f":{port}: no server can listen there"):
            measuring.run()
    assert measuring.done == []


LAUNCHER = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_launch as tests
def wait(cell):
    if cell.name == "bf16.c1.r1":
        print("here", flush=True)
        time.sleep(600)
matrix = tests.matrix_of(port=int(sys.argv[3]), stop_seconds=1)
measuring = tests.Measuring(matrix, Path(sys.argv[2]))
measuring.before = wait
measuring.run()
"""


def test_a_run_that_is_killed_leaves_no_server_and_goes_on(tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    arguments = [str(Path(__file__).parent), str(out), str(port)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "here\n"
    measuring = Measuring(matrix_of(port=port, stop_seconds=1), out)
    assert set(measuring.measured()) == {"none.c1.r1", "none.c4.r1"}
    with pytest.raises(OutputError, match="another process is matrix there"):
        measuring.run()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    measuring.run()  # it waits until the guard has ended the server that was left
    assert measuring.done == [
        "ready bf16", "bf16.c1.r1", "bf16.c4.r1",
        "ready none", "none.c1.r2", "none.c4.r2", "ready bf16", "bf16.c1.r2", "bf16.c4.r2",
    ]  # fmt: skip
    assert json.loads((out / "matrix.json").read_text(encoding="utf-8"))["engine"] == "vllm"
