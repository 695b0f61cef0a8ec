"""A matrix of servers, measured one after the other.

Variants take turns: each is started, measured at every concurrency and ended, then the next; and
all of it again as often as the matrix repeats, so that a machine which grows slower or warmer does
so for all of them alike. What is measured lies in the folder, one file for each variant,
concurrency and repeat. A run that was cut short goes on with the same command: it starts the
servers of which a file is missing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

from ...calibration.errors import ServerError
from ...calibration.server_client import Patience, ServerClient
from ...quantize.files.resumable import resumable_folder
from ...recipes.decode import encode
from ..errors import MeasureError
from .matrix import Matrix, Variant
from .server_process import Server, running_server, wait_for_free_port

_POLL = 0.25
_ONCE = Patience(attempts=1, seconds=10)
SECONDS_TO_KILL = 15.0
"""From SIGKILL until a port is free."""
SECONDS_TO_END = 2.0
"""From an error of an engine until it has ended itself."""
_HOW_LONG = ("repeats", "concurrencies", "host", "port", "start_seconds", "stop_seconds")
"""What may differ when a run goes on: more of the same, or elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement of a matrix; `repeat` counts from 1."""

    variant: Variant
    concurrency: int
    repeat: int

    @property
    def name(self) -> str:
        """For people, and of its files."""
        return f"{self.variant.name}.c{self.concurrency}.r{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Where a matrix lies: measurements and the servers' logs."""

    path: Path

    def measurement(self, cell: Cell) -> Path:
        """The file that a cell gets."""
        return self.path / "measurements" / f"{cell.name}.jsonl"

    def new_log(self, variant: Variant, repeat: int) -> Path:
        """A file for a server's words that is not there yet."""
        names = (f"{variant.name}.r{repeat}.{number}.log" for number in count(1))
        paths = (self.path / "logs" / name for name in names)
        return next(path for path in paths if not path.exists())


Ready = Callable[[Variant], Awaitable[None]]
"""Gets a first answer of a server that says it is healthy; raises MeasureError if it cannot."""
MeasureCell = Callable[[Cell, Path], None]
"""Measures the server that runs now, and writes the file whole or not at all."""


def cells(matrix: Matrix) -> tuple[Cell, ...]:
    """Every measurement of a matrix, in order."""
    return tuple(
        Cell(variant=variant, concurrency=concurrency, repeat=repeat)
        for repeat in range(1, matrix.repeats + 1)
        for variant in matrix.variants
        for concurrency in matrix.concurrencies
    )


def launch_matrix(
    matrix: Matrix,
    folder: Folder,
    *,
    plan: dict[str, Any],
    ready: Ready,
    measure: MeasureCell,
    on_progress: Callable[[str], None],
) -> None:
    """Measure what is not measured yet.

    Args:
        matrix: what is wanted.
        folder: created, or one in which the same was begun.
        plan: what makes it the same beside the matrix, as JSON says it: prompts and drafts.
        ready: asked until the matrix's `start_seconds` are over.
        measure: called for each cell while its server runs.
        on_progress: told what comes next.

    Raises:
        MeasureError: a server cannot be started, ends, or cannot be measured; what was measured
            before stays.
        OutputError: another matrix was begun in the folder, or another process is at it.
    """
    about = {key: value for key, value in encode(matrix).items() if key not in _HOW_LONG}
    with resumable_folder(folder.path, "matrix", about | plan):
        for part in ("measurements", "logs"):
            (folder.path / part).mkdir(exist_ok=True)
        for variant, repeat, missing in _servers(matrix, folder):
            what = f"{variant.name}, repeat {repeat} of {matrix.repeats}"
            log = folder.new_log(variant, repeat)
            on_progress(f"{what}: the server starts, its log is {log}")
            with _started(matrix, variant, log) as server:
                try:
                    asyncio.run(_wait_until_ready(matrix, server, partial(ready, variant)))
                    for cell in missing:
                        on_progress(f"{what}: concurrency {cell.concurrency}")
                        measure(cell, folder.measurement(cell))
                except (MeasureError, ServerError) as exc:
                    # That it ends says more than that it does not answer.
                    server.check_alive(SECONDS_TO_END, after=exc)
                    if isinstance(exc, ServerError):
                        raise server.error("the server does not answer", after=exc) from exc
                    raise
            _wait_for_free_port(matrix)


def _servers(matrix: Matrix, folder: Folder) -> Iterator[tuple[Variant, int, Sequence[Cell]]]:
    """Each server to start, and what to measure of it."""
    missing = [cell for cell in cells(matrix) if not folder.measurement(cell).exists()]
    for (repeat, _), some in groupby(missing, key=lambda cell: (cell.repeat, cell.variant.name)):
        of_server = list(some)
        yield of_server[0].variant, repeat, of_server


def _started(matrix: Matrix, variant: Variant, log: Path) -> AbstractContextManager[Server]:
    _wait_for_free_port(matrix)
    return running_server(
        variant.name,
        matrix.command_of(variant),
        environment=matrix.environment_of(variant),
        log=log,
        stop_seconds=matrix.stop_seconds,
    )


def _wait_for_free_port(matrix: Matrix) -> None:
    """A run that was killed may have left a server behind, which its guard is ending."""
    wait_for_free_port(matrix.host, matrix.port, matrix.stop_seconds + SECONDS_TO_KILL)


async def _wait_until_ready(
    matrix: Matrix, server: Server, first_answer: Callable[[], Awaitable[None]]
) -> None:
    """Until it is healthy and has answered.

    vLLM (0.32, entrypoints/serve/instrumentator/health.py:22), SGLang (0.5.23,
    srt/entrypoints/http_server.py:721) and TensorRT-LLM have /health, which says 200 no sooner than
    their model is loaded. What is compiled at the first request is not measured, for that is here.

    Raises:
        MeasureError: it ended, or was not ready in time.
    """
    seconds = matrix.start_seconds
    try:
        async with (
            asyncio.timeout(seconds),
            ServerClient(matrix.url, key=None, most_in_flight=1, patience=_ONCE) as client,
        ):
            while not await _is_healthy(client):
                server.check_alive()
                await asyncio.sleep(_POLL)
            await first_answer()
    except TimeoutError as exc:
        raise server.error(f"was not ready after {seconds} seconds (start_seconds)") from exc
    server.check_alive()


async def _is_healthy(client: ServerClient) -> bool:
    try:
        await client.get_text("/health")
    except ServerError:
        return False
    return True
