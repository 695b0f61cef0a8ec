"""Writing traces while the target goes on."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from ..traces.prompt_trace import PromptTrace
from .continuing import Left

_MOST_WAITING = 2


class TakesTraces(Protocol):
    """A `TraceWriter`, or what takes traces as it does."""

    @property
    def staging(self) -> Path:
        """A folder for files without a name."""

    def add(self, trace: PromptTrace, *, position: int) -> None:
        """Take one trace; `position` is the place of its prompt."""


class BackgroundWriter:
    """One thread that writes what has left, in order; leaving the block waits for it.

    Args:
        writer: that no one else uses meanwhile.
        first: position in the folder of the first prompt that may leave.
    """

    def __init__(self, writer: TakesTraces, first: int = 0) -> None:
        self._writer = writer
        self._first = first
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._thread.shutdown, cancel_futures=kind is not None)
            while self._waiting and kind is None:
                self._waiting.popleft().result()

    def write(self, left: Left) -> None:
        """Have it written soon.

        Raises:
            TraceError, OutputError: what was left before could not be written.
        """
        self._waiting.append(self._thread.submit(self._write, left))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft().result()

    def _write(self, left: Left) -> None:
        left.wait()
        for position, trace in left.traces:
            self._writer.add(trace, position=self._first + position)
