"""The one comparison: two views of a folder, tensor by tensor, in threads; and its findings.

One view is what is stored; the other is what the sources and the record say must be stored. The
caller decides how to make that view, and how to compare codes.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ...recipes.brief import Brief, counted, megabytes
from ...recipes.errors import VerifyError
from ..files.checkpoint import Checkpoint, byte_blocks
from ..files.digests import Digest, tensor_digest
from ..files.finiteness import Finiteness, check_finite
from ..files.safetensors_header import WORKERS, TensorInfo


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in the output: in a tensor, a module, a file or a config key."""

    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}"


def differing(
    where: str, pairs: Mapping[str, tuple[object, object]], expected: str = "{}", actual: str = "{}"
) -> list[Fault]:
    """A fault for each key whose wanted and found values differ."""
    return [
        Fault(f"{where}{key}", expected.format(wanted), actual.format(got))
        for key, (wanted, got) in pairs.items()
        if wanted != got
    ]


def others(
    where: str, expected: str, wrong: npt.NDArray[np.bool_], say: Callable[[tuple[int, ...]], str]
) -> list[Fault]:
    """At most one fault, for wrong elements: `say` describes the one at an index."""
    if not wrong.any():
        return []
    first = tuple(map(int, np.argwhere(wrong)[0]))
    return [Fault(where, expected, f"{int(wrong.sum())} other(s), {say(first)}")]


class NotFinite(Fault):
    """A tensor of the source holds NaN or infinity: no output made from it can be right."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str, problem: str | None) -> list[Fault]:
        """The fault for a problem that `Finiteness.problem` returned, if any."""
        return [cls(name, "finite numbers", problem)] if problem else []


def check_faults(out: Path, source: Path, faults: Sequence[Fault], *, fix: str) -> None:
    """Refuse to publish a folder with faults: the error names the first ten."""
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
        wrong_codes: codes that the rule does not give; any of them is a fault.
        max_error: largest |w/scale - code| relative to what is allowed, above 1 is a fault; None
            where no bounds apply, since codes are known exactly or may be anything.
        relative_l2_error: ||w - code * scale|| / ||w||; 0 for an all-zero weight.
        found: the rules by which another tool chose INT4 scales and codes; None if nothing is open.
    """

    module: str
    wrong_codes: int
    max_error: float | None
    relative_l2_error: float
    found: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizedLinear:
    """What rounding to the output's dtype lost in one linear; p is the float32 code * scale.

    Attributes:
        elements: weights of the linear. rounded: those whose stored value differs from p.
        max_relative_difference: largest |stored - p| / |p| over p != 0. Half an ulp is at most
            2^-8 for BF16 and 2^-11 for F16, except for subnormals; 0 for F32.
    """

    module: str
    elements: int
    rounded: int
    max_relative_difference: float


class Verified(Brief):
    """What a comparison found."""

    __slots__ = ()
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Verified):
    """How a quantized folder compares with its source.

    Attributes:
        output: the folder. source: the draft that it was made from.
        scheme: the scheme that the folder declares; None if it declares nothing.
        rule: what was demanded of quantized values and scales; None where nothing could be read.
        kept: number of tensors that were compared byte by byte.
        quantized: number of linears that were decoded and compared.
        bytes_compared: bytes of source and folder together.
        linears: what was found in each quantized linear.
        source_digests: source tensor -> hash. output_digests: output tensor -> hash.
        faults: everything that is wrong; empty means that every byte is accounted for.
        dropped: source tensors that the recipe leaves to the target.
        dropped_shown: these were compared with the target's tensors in this verification.
        learned_norms: norms that learned with the quantized values, so that they differ from the
            source's -> the largest factor by which an element changed, as recorded and found.
        vocabulary: rows of the head, where the folder was compared as a cut of the source; else
            None.
        head_unshown: its rows come from the target's head, which was not available: they have
            the recorded digest.
    """

    output: str
    source: str
    scheme: str | None = None
    rule: str | None = None
    kept: int = 0
    quantized: int = 0
    bytes_compared: int = 0
    linears: tuple[LinearFinding, ...] = ()
    source_digests: Mapping[str, str] = field(default_factory=dict)
    output_digests: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...]
    dropped: tuple[str, ...] = ()
    dropped_shown: bool = False
    learned_norms: Mapping[str, float] = field(default_factory=dict)
    vocabulary: str | None = None
    head_unshown: bool = False

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


OnBytes = Callable[[int], None]
"""Called with the number of bytes read."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """What comparisons found; digests by tensor name.

    Attributes:
        absmax: module -> largest magnitude of the source weight, where its scales are good.
        scheme: the scheme of a transcoded folder.
    """

    faults: list[Fault] = field(default_factory=list)
    source_digests: dict[str, str] = field(default_factory=dict)
    output_digests: dict[str, str] = field(default_factory=dict)
    linears: list[LinearFinding] = field(default_factory=list)
    dequantized: list[DequantizedLinear] = field(default_factory=list)
    absmax: dict[str, float] = field(default_factory=dict)
    scheme: str | None = None

    def add(self, other: "Compared") -> None:
        """Add what another comparison found."""
        self.faults += other.faults
        self.source_digests |= other.source_digests
        self.output_digests |= other.output_digests
        self.linears += other.linears
        self.dequantized += other.dequantized
        self.absmax |= other.absmax

    @property
    def digests(self) -> dict[str, Any]:
        """The digests of both sides, by name, in the form of a report."""
        return {
            "source_digests": dict(sorted(self.source_digests.items())),
            "output_digests": dict(sorted(self.output_digests.items())),
        }


def compare_all(
    tensors: Iterable[TensorInfo], compare: Callable[[TensorInfo], Compared]
) -> Compared:
    """Compare the largest tensors first, so that workers end together; findings by name."""
    whole = Compared()
    with ThreadPoolExecutor(WORKERS) as pool:
        ordered = sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.name))
        results = {tensor.name: pool.submit(compare, tensor) for tensor in ordered}
        for name in sorted(results):
            whole.add(results[name].result())
    return whole


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared: what must be stored, what is stored, and who hears of bytes."""

    source: Checkpoint
    output: Checkpoint
    on_bytes: OnBytes = lambda _count: None


def hash_the_rest(sides: Sides, compared: Compared) -> list[Fault]:
    """Add the digests of tensors that have none; faults are values that no source may have."""

    def hashed(checkpoint: Checkpoint, tensor: TensorInfo) -> Compared:
        look = Finiteness(tensor.dtype, tensor.shape)
        digest = tensor_digest(checkpoint, tensor, look.look)
        sides.on_bytes(tensor.nbytes)
        faults = NotFinite.of(tensor.name, look.problem)
        return Compared(output_digests={tensor.name: digest}, faults=faults)

    faults = []
    both = (sides.source, compared.source_digests), (sides.output, compared.output_digests)
    for checkpoint, digests in both:
        left = [tensor for name, tensor in checkpoint.tensors.items() if name not in digests]
        whole = compare_all(left, partial(hashed, checkpoint))
        digests |= whole.output_digests
        faults.append(whole.faults)
    return faults[0]


def form(tensor: TensorInfo | None) -> str:
    """Dtype and shape, for a fault; "none" where there is no such tensor."""
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "none"


def matched(
    wanted: Mapping[str, TensorInfo], present: Mapping[str, TensorInfo]
) -> tuple[list[TensorInfo], list[Fault]]:
    """The wanted tensors that exist with that name, dtype and shape; a fault for each other one."""
    alike, faults = [], []
    for name in sorted(wanted.keys() | present.keys()):
        want, got = wanted.get(name), present.get(name)
        if want is not None and form(want) == form(got):
            alike.append(want)
        else:
            faults.append(Fault(name, form(want) if want else "no such tensor", form(got)))
    return alike, faults


def compare_kept(sides: Sides, tensor: TensorInfo) -> Compared:
    """Compare a tensor of the source with the output's of the same name and shape, byte by byte."""
    source, output = sides.source, sides.output
    digest, finiteness = Digest(), Finiteness(tensor.dtype, tensor.shape)
    other = digest  # one hash serves both tensors until the first difference
    changed, first_change, done = 0, -1, 0
    blocks = byte_blocks(source, tensor), byte_blocks(output, output.tensors[tensor.name])
    for a, b in zip(*blocks, strict=True):
        x, y = (np.frombuffer(side, np.uint8) for side in (a, b))
        if len(different := np.flatnonzero(x != y)):
            if not changed:
                other = digest.copy()
                first_change = done + int(different[0])
            changed += len(different)
        digest.update(a)
        finiteness.look(a)
        if changed:
            other.update(b)
        done += len(a)
        sides.on_bytes(2 * len(a))
    compared = Compared(
        source_digests={tensor.name: str(digest)},
        output_digests={tensor.name: str(other)},
        faults=NotFinite.of(tensor.name, finiteness.problem),
    )
    if changed:
        what = f"{changed} different byte(s), first at byte {first_change}"
        compared.faults.append(Fault(tensor.name, "the source's bytes", what))
    return compared


class BytesRead:
    """Bytes read so far, over all workers; counts are passed on one at a time."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self.done = 0
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add `count` bytes."""
        with self._lock:
            self.done += count
            self._on_bytes(count)
