"""What verification found, of one tensor and of a folder: faults, errors and hashes.

Plain data for JSON; and how far it is.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from ...recipes.brief import Brief, counted, megabytes
from ...recipes.errors import VerifyError
from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.digests import NEWEST, Algorithm, Digest, Finiteness, check_finite
from ..files.safetensors_header import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong in the output, at a tensor, a module, a file or a config key."""

    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}"


class NotFinite(Fault):
    """A tensor of the source holds NaN or infinity: no output of it can be right."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str, problem: str | None) -> list[Fault]:
        """Of `Finiteness.problem`."""
        return [cls(where=name, expected="finite numbers", got=problem)] if problem else []


def check_faults(out: Path, source: Path, faults: Sequence[Fault], *, fix: str) -> None:
    """What verification finds fault with is not published.

    Args:
        fix: what to do about any that are not the source's.

    Raises:
        CheckpointError: tensors of the source are not finite.
        VerifyError: names the first ten faults.
    """
    check_finite(source, {each.where: each.got for each in faults if isinstance(each, NotFinite)})
    if faults:
        raise VerifyError(
            out,
            "the written folder does not pass verification, and is not published:",
            details=[f"  {fault}" for fault in faults[:10]],
            fix=fix,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFinding:
    """How far a decoded linear is from its source weight w.

    Attributes:
        module: on-disk name.
        wrong_codes: codes that the rule does not give; any is a fault.
        max_error: largest |w/scale - code| in units of what is allowed, above 1 is a fault; None
            where codes are not held against bounds, but are exactly known, or may be anything.
        relative_l2_error: ||w - code * scale|| / ||w||; 0 for an all-zero weight.
        found: by which rules another tool took INT4 scales and codes; None where nothing is open.
    """

    module: str
    wrong_codes: int
    max_error: float | None
    relative_l2_error: float
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Brief):
    """How a quantized folder compares with its source.

    Attributes:
        output: the folder. source: the draft that it was made from.
        scheme: the scheme that the folder declares; None if it declares nothing.
        rule: what was demanded of quantized values and scales; None where nothing could be read.
        kept: number of tensors that were compared byte by byte.
        quantized: number of linears that were decoded and compared.
        bytes_compared: bytes of source and folder together.
        linears: what was found of each quantized linear.
        source_digests: source tensor -> hash. output_digests: output tensor -> hash.
        faults: everything that is wrong; empty means that every byte is accounted for.
        dropped: source tensors that the recipe leaves to the target.
        dropped_shown: these were compared with the target's tensors in this verification.
        learned_norms: norms that learned with the quantized values, which are not the source's ->
            the largest factor by which an element changed, as recorded and found.
        vocabulary: how much of it the head has, of a folder that was compared as a cut of the other
            one; None of all others.
        head_unshown: its rows are those of the target's head, which was not at hand: they have the
            digest that is recorded.
    """

    output: str
    source: str
    scheme: str | None
    rule: str | None
    kept: int
    quantized: int
    bytes_compared: int
    linears: tuple[LinearFinding, ...]
    source_digests: Mapping[str, str]
    output_digests: Mapping[str, str]
    faults: tuple[Fault, ...]
    dropped: tuple[str, ...] = ()
    dropped_shown: bool = False
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    vocabulary: str | None = None
    head_unshown: bool = False

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults

    def to_mapping(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    @override
    def brief(self) -> Mapping[str, object]:
        wrong = f"WRONG: {counted(len(self.faults), 'fault')}"
        return {
            "verified": "verified, every byte" if self.ok else wrong,
            "folder": Path(self.output),
            "first fault": None if self.ok else self.faults[0],
            "linears": f"{self.quantized} quantized, {self.kept} tensors kept",
            "compared": megabytes(self.bytes_compared),
        }


def unreadable(output: Path, source: Path, fault: Fault) -> VerifyReport:
    """Nothing else can be judged in a folder whose headers or declaration cannot be read."""
    return VerifyReport(
        output=str(output),
        source=str(source),
        scheme=None,
        rule=None,
        kept=0,
        quantized=0,
        bytes_compared=0,
        linears=(),
        source_digests={},
        output_digests={},
        faults=(fault,),
    )


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
    source_digests: dict[str, str] = field(default_factory=dict)
    output_digests: dict[str, str] = field(default_factory=dict)
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


# ---- Tensors that are no codes and do not change: the source's bytes, which are finite numbers


def compare_kept(
    source: Checkpoint,
    output: Checkpoint,
    tensor: TensorInfo,
    on_bytes: OnBytes,
    algorithm: Algorithm = NEWEST,
) -> Compared:
    """Byte equality of a tensor of `source` and the one of the same name and shape in `output`."""
    digest, finiteness = Digest(algorithm), Finiteness(tensor.dtype, tensor.shape)
    other = digest  # one hash serves both tensors up to the first difference
    changed, first_change, done = 0, -1, 0
    sides = byte_blocks(source, tensor), byte_blocks(output, output.tensors[tensor.name])
    for a, b in zip(*sides, strict=True):
        if not _equal(a, b):
            different = np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))
            if not changed:
                other = digest.copy()
                first_change = done + int(different[0])
            changed += len(different)
        digest.update(a)
        finiteness.look(a)
        if changed:
            other.update(b)
        done += len(a)
        on_bytes(2 * len(a))
    found = Compared(
        source_digests={tensor.name: str(digest)},
        output_digests={tensor.name: str(other)},
        faults=NotFinite.of(tensor.name, finiteness.problem),
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        found.faults.append(Fault(where=tensor.name, expected="the source's bytes", got=what))
    return found


def _equal(a: memoryview, b: memoryview) -> bool:
    """Compared eight bytes at a time, as far as that goes."""
    whole = len(a) // 8 * 8
    x, y = (np.frombuffer(side[:whole], np.uint64) for side in (a, b))
    return np.array_equal(x, y) and a[whole:] == b[whole:]
