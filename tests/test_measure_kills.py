"""A measurement whose process is killed, again and again: no record is lost, none there twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import measuring_process
import pytest
from draftquant.validate.measure.measurement_file import read_measurement
from measuring_process import INTERRUPTED, PROMPTS
from vllm_server import VLLMServer, served


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Each line that the process is told begins a run, whose process number it says."""
    draws, out = random.Random(3), tmp_path / "r"
    unfinished = tmp_path / "r.measuring"

    def kept() -> set[str]:
        lines = unfinished.read_text(encoding="utf-8").split("\n")[1:-1]
        assert len(lines) == len(set(lines))
        return set(lines)

    with served(VLLMServer(seconds=0.04)) as running:
        command = [sys.executable, measuring_process.__file__, running.url, str(out)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def ended(answers: int, number: int | None) -> int:
                """What a run ends with to which a signal is sent after so many answers."""
                running.finished = 0
                process.stdin.write("begin\n")  # type: ignore[union-attr]
                child = int(process.stdout.readline())  # type: ignore[union-attr]
                end = time.monotonic() + 600
                while number is not None and running.finished < answers:
                    assert time.monotonic() < end
                    time.sleep(0.001)
                if number is not None:
                    os.kill(child, number)
                return int(process.stdout.readline())  # type: ignore[union-attr]

            before: set[str] = set()
            for _ in range(3):
                answers = draws.randint(8, 16)  # with the probe and the warm-up
                assert ended(answers, signal.SIGKILL) == -signal.SIGKILL
                assert not out.exists()
                assert before <= kept()
                assert len(kept()) >= len(before) + answers - 3 - 4 - 4  # in flight, on their way
                before = kept()
            running.seconds = 1.0  # slow: it must not be done before it is stopped
            assert ended(5, signal.SIGINT) == INTERRUPTED  # what is answered is kept
            assert before <= kept()
            running.seconds = 0.04
            assert ended(0, None) == 0
            process.stdin.close()
    assert [record.id for record in read_measurement(out).records] == [p.id for p in PROMPTS]
    lines = out.read_text(encoding="utf-8").splitlines()
    assert before <= set(lines)
    assert len(lines) == len(set(lines)) == len(PROMPTS) + 1
    assert [*tmp_path.iterdir()] == [out]
