"""Progress in a log: a line when a phase ends, one of a phase that goes on, none of a short one."""

import re
import threading
import time
from collections.abc import Iterator

import pytest
from draftquant.scripts import progress
from draftquant.scripts.progress import progress_bar, seconds, speed
from draftquant.scripts.terminal import speak


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
    return now


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_phase_says_how_much_and_how_fast(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("write", 4_000_000, "bytes") as bar:
        bar.advance(4_000_000)
        clock[0] += 2
        bar.phase("replay", 10)
        bar.set(10, 10)
        clock[0] += 20
    assert said(capsys) == ["write: 4.0 MB in 2.0 s, 2 MB/s", "replay: 10 in 20 s, 2.0 s each"]


def test_a_long_phase_says_about_every_tenth_how_long_it_still_takes(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("replay", 1000) as bar:
        for _ in range(1000):
            clock[0] += 0.5
            bar.advance()
    lines = said(capsys)
    assert lines[0] == "replay: 1% of 1,000, 2.0/s, 8 min 15 s left"
    assert lines[-1] == "replay: 1,000 in 8 min 20 s, 2.0/s"
    assert 8 <= len(lines) <= 40


def test_short_phases_say_nothing_unless_asked(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for verbose, lines in ((False, []), (True, ["write: 1 in 0.1 s, 10.0/s", "sync: 0.0 s"])):
        speak(quiet=False, verbose=verbose)
        with progress_bar("write", 1) as bar:
            bar.advance()
            clock[0] += 0.1
            bar.phase("sync")
        assert said(capsys) == lines


def test_quiet_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    speak(quiet=True, verbose=True)
    with progress_bar("write", 10) as bar:
        for _ in range(10):
            clock[0] += 60
            bar.advance()
    assert said(capsys) == []


def test_a_phase_without_an_end_is_said_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHORT", 0.05)
    with progress_bar("load AMD Quark", None):
        deadline = time.monotonic() + 600
        while not (lines := said(capsys)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lines == ["load AMD Quark ..."]
    assert re.fullmatch(r"load AMD Quark: [0-9.]+ (s|min.*)", said(capsys)[0])


def test_an_error_ends_a_phase_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(progress.threading, "Timer", Timer)

    def fail() -> None:
        with progress_bar("load", None):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    (timer,) = timers
    timer.run()  # its time has come, and it was cancelled
    assert said(capsys) == []


def test_labels_are_escaped(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("a\x1b[2J", 1) as bar:
        clock[0] += 2
        bar.advance()
    assert said(capsys) == ["a\\x1b[2J: 1 in 2.0 s, 2.0 s each"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (10.2, "11 s"), (99.0, "99 s"), (100.0, "1 min 40 s"),
     (3599.5, "1 h 00 min"), (7500.0, "2 h 05 min")],
)  # fmt: skip
def test_seconds(count: float, shown: str) -> None:
    assert seconds(count) == shown


def test_speed() -> None:
    assert speed(517e6, "bytes") == "517 MB/s"
    assert speed(3.25, "items") == "3.2/s"
    assert speed(0.25, "items") == "4.0 s each"
