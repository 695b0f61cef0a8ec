"""A measurement whose process is killed, again and again: no record is lost, none there twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import measuring_process
import pytest
from draftquant.validate.measure.measurement_file import read_measurement
from measuring_process import INTERRUPTED, PROMPTS
from vllm_server import VLLMServer, served


@pytest.fixture(scope="module")
def running() -> Iterator[VLLMServer]:
    with served(VLLMServer(seconds=0.04)) as found:
        yield found


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills") / "r"


@pytest.fixture(scope="module")
def runs(running: VLLMServer, out: Path) -> Iterator["subprocess.Popen[str]"]:
    """Each line that it is told begins a run."""
    command = [sys.executable, measuring_process.__file__, running.url, str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def said(runs: "subprocess.Popen[str]") -> int:
    assert runs.stdout is not None
    return int(runs.stdout.readline())


def begun(runs: "subprocess.Popen[str]") -> int:
    """The process number of a new run."""
    assert runs.stdin is not None
    runs.stdin.write("begin\n")
    return said(runs)


def kept(out: Path) -> list[str]:
    """Whole lines of what is not finished."""
    path = out.with_name(f"{out.name}.measuring")
    lines = path.read_text(encoding="utf-8").split("\n")[1:-1] if path.exists() else []
    return sorted(lines)


def wait_for(running: VLLMServer, answers: int) -> None:
    end = time.monotonic() + 600
    while running.finished < answers:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(
    running: VLLMServer, runs: "subprocess.Popen[str]", out: Path
) -> None:
    draws = random.Random(3)
    before: list[str] = []
    counts = []
    while len(before) < len(PROMPTS) - 12:
        running.finished = 0
        child = begun(runs)
        answers = draws.randint(8, 16)  # with the probe and the warm-up
        wait_for(running, answers)
        time.sleep(draws.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert said(runs) == -signal.SIGKILL
        assert not out.exists()
        now = kept(out)
        assert set(before) <= set(now)
        assert len(now) >= len(before) + answers - 3 - 4 - 4  # those in flight, and on their way
        before = now
        counts.append(len(now))
    assert len(counts) >= 4
    running.finished, running.seconds = 0, 1.0  # slow: it must not be done before it is stopped
    child = begun(runs)
    wait_for(running, 5)
    os.kill(child, signal.SIGINT)  # what is answered is kept
    assert said(runs) == INTERRUPTED
    assert len(kept(out)) >= len(before) + 5 - 3 - 4
    running.seconds = 0.04
    begun(runs)
    assert said(runs) == 0
    assert [record.id for record in read_measurement(out).records] == [p.id for p in PROMPTS]
    lines = out.read_text(encoding="utf-8").splitlines()
    assert set(before) <= set(lines)
    assert len(lines) == len(set(lines)) == len(PROMPTS) + 1
    assert [*out.parent.iterdir()] == [out]
