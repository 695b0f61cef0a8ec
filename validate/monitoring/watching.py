"""A watch: reads the counters of a live draft again and again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...calibration.errors import ServerError
from ...recipes.errors import DraftQuantError
from ..errors import MeasureError
from .counter_stream import where_they_stand
from .drift import Detectors, Drift, Reading
from .readings import Source
from .watch_state import WatchState, write_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a watch reads, and when it ends.

    Attributes:
        every: seconds between two readings.
        seconds: after which it ends; None = never by itself.
        once: it ends after one reading.
        until_alarm: it ends with the first alarm.
    """

    every: float
    seconds: float | None = None
    once: bool = False
    until_alarm: bool = False


class Watcher(Protocol):
    """Who hears of the readings."""

    def reading(self, found: Reading) -> None:
        """The counters were read."""

    def missed(self, problem: DraftQuantError) -> None:
        """The counters could not be read, and are asked for again at the next reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The file of the state.

    Attributes:
        path: of the file. of: see `WatchState`.
    """

    path: Path
    of: dict[str, str]

    def write(self, drift: Drift) -> None:
        """See `write_state`."""
        write_state(self.path, WatchState(of=self.of, drift=drift))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The time, in seconds since 1970, and how to wait."""

    now: Callable[[], float] = time.time
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep


async def keep_watching(
    source: Source,
    detectors: Detectors,
    schedule: Schedule,
    watcher: Watcher,
    *,
    drift: Drift | None = None,
    kept: Kept | None = None,
    clock: Clock = Clock(),
) -> None:
    """Read until the schedule ends.

    Args:
        source: of the counters.
        detectors: what is watched.
        schedule: when.
        watcher: hears of every reading.
        drift: where an earlier watch stood; None = this one begins.
        kept: where the state is written after every reading.
        clock: the time.

    Raises:
        ServerError: the first reading gets no answer; later ones are missed.
        MeasureError: the first reading has no counters of verify steps.
        WatchError: the server drafts more tokens per step than golden.
    """
    began, first = clock.now(), True
    while True:
        try:
            page = await source.read()
            now = clock.now()
            if drift is None:
                sources = where_they_stand(page, source.engine, source.where)
                detectors.check_positions(page, source.where)
                drift, alarmed = detectors.begin(sources, now), False
            else:
                drift, reading = detectors.read(drift, page, now, source.where)
                watcher.reading(reading)
                alarmed = bool(reading.fallen)
            if kept is not None:
                kept.write(drift)
        except (ServerError, MeasureError) as exc:
            if first:
                raise
            watcher.missed(exc)
            alarmed = False
        first = False
        ended = schedule.seconds is not None and clock.now() - began >= schedule.seconds
        if schedule.once or ended or (alarmed and schedule.until_alarm):
            return
        await clock.wait(schedule.every)
