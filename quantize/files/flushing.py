"""Bringing a folder to the disk while it is being written, and while it is being verified.

A disk is slower than its cache: what is written waits for it at the end, unless it begins early.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

_PAUSE = 0.1  # seconds; the first files of a small folder are synced once


class Flushing:
    """A thread that syncs the files of a folder; use as a context manager.

    Each file is held open from when it is first seen, so that no error of the disk is lost.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[Path, int] = {}
        self._all_written = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._runs: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._runs.append(self._pool.submit(self._begin))
        return self

    def __exit__(self, *exception: object) -> None:
        self._all_written.set()
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def finish(self) -> None:
        """Everything is written: sync it, while this thread goes on."""
        self._all_written.set()
        self._runs.append(self._pool.submit(self._sync, os.fsync))

    def wait(self) -> None:
        """Until everything is on the disk.

        Raises:
            OSError: the disk has failed.
        """
        for run in self._runs:
            run.result()

    def _begin(self) -> None:
        while not self._all_written.wait(_PAUSE):
            self._sync(os.fdatasync)

    def _sync(self, sync: Callable[[int], None]) -> None:
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
        for descriptor in self._descriptors.values():
            sync(descriptor)
