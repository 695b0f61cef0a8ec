"""Progress in a log: a line when a phase ends, one of a phase that goes on, none of a short one."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from draftquant.recipes.listener import beyond_kept
from draftquant.scripts.cli import main
from draftquant.scripts.frame import progress
from draftquant.scripts.frame.progress import heartbeat, progress_bar, seconds
from draftquant.scripts.frame.streams import SPEECH, speak
from test_scenes import PAIR, PLAIN
from test_scenes import said as written_drafts
from told import check_told


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    speak(quiet=False, verbose=False)
    yield
    speak(quiet=False, verbose=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    SPEECH.spoke()
    return now


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_phase_says_how_much_and_how_fast_and_a_long_one_every_tenth_how_long_it_still_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("write", 4_000_000, "bytes") as bar:
        bar.advance(4_000_000)
        clock[0] += 2
        bar.phase("replay", 1000)
        for _ in range(1000):
            clock[0] += 0.5
            bar.advance()
        bar.phase("compare", 1, "work")  # has no unit: a share is shown
        for done in (250, 500, 1000):
            clock[0] += 10
            bar.set(done, 1000)
    first, *lines = said(capsys)
    assert first == "write: 4.0 MB in 2.0 s, 2 MB/s"
    assert lines[0] == "replay: 1% of 1,000 after 5.0 s, about 8 min 15 s left"
    assert lines[-4] == "replay: 1,000 in 8 min 20 s, 2.0/s"
    assert 500 / 30 <= len(lines) - 3 <= 40
    assert lines[-3:] == [
        "compare: 25% after 10 s, about 30 s left",
        "compare: 50% after 20 s, about 20 s left",
        "compare: done in 30 s",
    ]


@pytest.mark.parametrize(
    ("done", "took", "waited", "left"),
    [(0, 5, 0, None), (1, 5, 0, None), (2, 5, 0, 495), (100, 100, 0, 100), (100, 100, 50, 50),
     (50, 10, 1, 29), (100, 100, 101, None), (160, 2, 0, 0.5), (200, 9, 0, None)],
)  # fmt: skip
def test_what_is_left_goes_by_the_pace_of_what_is_done(
    clock: list[float], done: int, took: float, waited: float, left: float | None
) -> None:
    phase = progress.Phase("replay")
    clock[0] += took
    phase.move(done, 200)
    clock[0] += waited
    assert phase.left == left


def test_a_command_beats_outside_of_phases_too_and_not_after_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.1)
    monkeypatch.setattr(progress, "SHORT", 0.1)
    with heartbeat("gate"):
        lines = wait_for_lines(capsys, 2)
        with progress_bar("replay", 10):
            inside = wait_for_lines(capsys, 2)
    after = said(capsys)
    assert all(re.fullmatch(r"gate: running for [0-9.]+ s", line) for line in lines)
    assert all(re.fullmatch(r"replay: 0% of 10 after [0-9.]+ s", line) for line in inside[1:])
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    time.sleep(0.3)
    assert said(capsys) == []
    every = [*lines, *inside, *after]
    assert len(set(every)) == len(every)  # no line twice


def wait_for_lines(capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    lines: list[str] = []
    deadline = time.monotonic() + 30
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
        lines += said(capsys)
    assert len(lines) >= count
    return lines


def test_short_phases_say_nothing_unless_asked_and_quiet_nothing_at_all(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for quiet, verbose, passed, lines in (
        (False, False, 0.1, []),
        (False, True, 0.1, ["write: 1 in 0.1 s, 10.0/s", "sync: done in 0.0 s"]),
        (True, True, 600, []),
    ):
        speak(quiet=quiet, verbose=verbose)
        with progress_bar("write", 1) as bar:
            bar.advance()
            clock[0] += passed
            bar.phase("sync")
        assert said(capsys) == lines


def test_a_run_that_goes_on_counts_its_own_steps() -> None:
    """An earlier run did 20 of 50 steps: what is left is 30, at this run's speed."""
    told: list[tuple[int, int]] = []
    bar: Any = SimpleNamespace(set=lambda *at: told.append(at))
    show = beyond_kept(bar, own=1)
    for step in (21, 22, 23):
        show(step, 50)
    assert told == [(1, 30), (2, 30), (3, 30)]


def test_seconds() -> None:
    shown = ["0.0 s", "9.9 s", "11 s", "99 s", "1 min 40 s", "1 h 00 min", "2 h 05 min"]
    assert [seconds(count) for count in ((0.04, 9.94, 10.2, 99.0, 100.0, 3599.5, 7500.0))] == shown


# ---- every phase of a command rises to its total, and is told by name


COMMANDS = f"""\
quantize draft --recipe int4-channel-gptq --traces said --out gptq
quantize draft --recipe fp8-ptpc --vocab-size 24 --traces said --out cut
quantize draft --recipe blackwell-fp8 --kv-cache measured --traces said --out static
transcode cut --layout quark --out carried
dequantize gptq --out plain
vocab draft --traces said --size 24 --out rows
gate draft gptq --traces other -k 2
{PLAIN} --num-prompts 1 --out recorded
traces merge said other --out both
"""


class Heard(progress.Phase):
    """A phase that is remembered, and never goes back or beyond its end."""

    phases: ClassVar[list["Heard"]] = []

    def __init__(self, *told: Any, **named: Any) -> None:
        super().__init__(*told, **named)
        self.phases.append(self)

    def move(self, done: int, total: int) -> None:
        assert self.done <= done <= (total or done), (self.label, self.done, done, total)
        super().move(done, total)


@pytest.mark.untold
def test_every_phase_rises_to_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written_drafts(tmp_path)
    monkeypatch.setattr(progress, "Phase", Heard)
    for number, line in enumerate(COMMANDS.splitlines(), 1):
        Heard.phases.clear()
        code = main(line.split())
        ends = [f"{a.label}: {a.done:,} of {a.total:,} {a.unit}" for a in Heard.phases if a.label]
        name = line.replace(f"{PAIR}/", "")
        check_told("phases", {f"{number:02} {name}": "\n".join([f"exit code {code}", *ends])})
