"""`Compared`: what the comparison of one tensor with its source gives; and its blocks of rows."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .verify_report import Fault, LinearFinding

OnBytes = Callable[[int], None]
"""Called with the number of bytes read."""
OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """What one comparison found; hashes by tensor name.

    Attributes:
        absmax: largest magnitude of the source weight; None unless its scales are good.
    """

    faults: list[Fault] = field(default_factory=list)
    source_sha256: dict[str, str] = field(default_factory=dict)
    output_sha256: dict[str, str] = field(default_factory=dict)
    linear: LinearFinding | None = None
    absmax: float | None = None


def blocks_of(rows: int, per_block: int) -> Iterator[range]:
    """Consecutive blocks of rows."""
    for first in range(0, rows, per_block):
        yield range(first, min(first + per_block, rows))


class Progress:
    """Bytes read so far, over all workers."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.done = 0
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self.done += count
            if self._on_progress is not None:
                self._on_progress(self.done, self._total)
