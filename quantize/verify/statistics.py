"""What the codes and scales of a quantized linear show by themselves, without its source.

In numpy, a block of rows at a time, with the decoder of `verify`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...recipes.formats import NumberFormat
from ..drafts import Row
from ..files.checkpoint import Checkpoint
from ..files.safetensors_header import TensorInfo
from ..stored.declarations import DeclaredScheme
from ..stored.decoded_numbers import E2M1, E4M3, Bytes, Floats
from ..stored.linear import StoredLinear
from ..stored.parts import scale_suffix
from .dequantized_verification import row_blocks
from .magnitudes import group_absmax
from .verify_report import Fault

_TOP_UNDER_POWERS = 4.0
"""Code that the largest weight under an absmax scale gets at least: powers of two put it at 4 or 6.

Under other scales it is the largest of the format: for absmax / 7.5 it is 7 or -8, for absmax / 7
it is 7; roundings of the scale to BF16, F16 or F8_E4M3 do not move the largest weight out of its
last step.
"""
# Below it, an arithmetic that flushes to zero loses the scale. E8M0 is read as a float32, F8_E4M3
# is multiplied by a float32 scale.
_SMALLEST_NORMAL = {"F16": 2.0**-14} | dict.fromkeys(
    ("BF16", "F32", "F8_E4M3", "U8", "F8_E8M0"), 2.0**-126
)
_BINS = 32

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeStatistics:
    """The codes and scales of one linear; shares lie in [0, 1].

    Attributes:
        num_scales: stored ones; the one over NVFP4's group scales is not counted.
        smallest_scale: of the finite ones, as multiplier of the codes; None if there are none.
        largest_scale: likewise.
        saturated: share of the codes at an end of the range: -8 and 7, ±448, ±6. Asymmetric codes
            count from the middle of their range here, whatever their zero points are.
        zero: share of the codes that are zero.
        zero_halves: the same in the embedding half and in the hidden half of a concat input; None
            for other linears.
        distinct: values that occur. possible: values of the format, +0 and -0 being one.
        scales_fit: share of the scales whose largest code is that of absmax or more, of those with
            codes that are not all zero; None if all are. Below 1, codes are wasted: a scale that
            fused linears share, or that was learned, but also one that belongs to other codes.
    """

    num_scales: int
    smallest_scale: float | None
    largest_scale: float | None
    saturated: float
    zero: float
    zero_halves: tuple[float, float] | None
    distinct: int
    possible: int
    scales_fit: float | None


def code_statistics(
    checkpoint: Checkpoint, scheme: DeclaredScheme, row: Row, *, concat: bool, ours: bool
) -> tuple[CodeStatistics, list[Fault]]:
    """Look at every code and scale of a linear, its stored tensors already checked by header.

    Args:
        row: the linear, of its unquantized shape.
        concat: it reads the concat input of EAGLE-3.
        ours: this package made the folder, whose scales are positive.

    Returns:
        The figures; and as faults: scales that are not finite, not positive or subnormal over codes
        that are not all zero; NaN codes; four-bit codes that use less than half of the range
        everywhere.
    """
    module = row.module
    with np.errstate(all="ignore"):  # NaN and infinity are reported as faults
        linear = StoredLinear(checkpoint, scheme, module, in_features=row.tensor.shape[1])
        codes = _Codes(scheme, row.tensor.shape)
        for rows in row_blocks(row):
            codes.add(rows, linear, linear.bytes_of(rows))
        peaks = _per_scale(codes.peaks, scheme)
    scale = linear.scale[:: scheme.rows_of_scale]
    stored = checkpoint.tensors[f"{module}.{scale_suffix(scheme)}"]
    size = np.abs(scale) if scheme.has_signed_scales and not ours else scale
    faults = _scale_faults(stored, size, peaks) + codes.faults(linear.codes_tensor.name)
    return codes.statistics(scale, peaks, concat=concat), faults


def _values(number: NumberFormat) -> Floats:
    if number.is_integer:
        return np.arange(-(2 ** (number.bits - 1)), 2 ** (number.bits - 1), dtype=np.float32)
    return E4M3 if number.is_fp8 else E2M1


class _Codes:
    """The codes of one linear, counted over blocks of rows.

    Args:
        shape: out_features, in_features.

    Attributes:
        peaks: [out_features, groups], largest magnitude under each scale of a row.
    """

    def __init__(self, scheme: DeclaredScheme, shape: tuple[int, ...]) -> None:
        self._number = scheme.number
        self._in_features = shape[1]
        self._group = scheme.group_size or shape[1]
        self._values = _values(scheme.number)
        # The twofold values of FP4 are whole numbers in [-16, 14].
        fp4 = scheme.number.is_fp4
        self._bins = (np.arange(_BINS, dtype=np.float32) - 16) / 2 if fp4 else self._values
        self._counts: Counts = np.zeros(len(self._bins), np.int64)
        self._zeros: Counts = np.zeros(2, np.int64)
        self._first_nan: tuple[int, int] | None = None
        self.peaks: Floats = np.zeros((shape[0], -(-shape[1] // self._group)), np.float32)

    def add(self, rows: range, linear: StoredLinear, stored: Bytes) -> None:
        """One block of rows, decoded and as stored."""
        codes = linear.levels(rows, stored)
        if self._number.is_fp8:
            index = stored
        else:
            step = np.float32(2 if self._number.is_fp4 else 1)
            index = ((codes - self._bins[0]) * step).astype(np.uint8).reshape(-1)
        self._counts += np.bincount(index, minlength=len(self._bins))
        half = self._in_features // 2
        self._zeros += [np.count_nonzero(part == 0) for part in (codes[:, :half], codes[:, half:])]
        by_group = codes if linear.order is None else codes[:, linear.order]
        bits = group_absmax(by_group.view(np.uint32), self._group)
        peaks = self.peaks[rows.start : rows.stop] = bits.view(np.float32)
        if self._first_nan is None and np.isnan(peaks).any():
            row, column = map(int, np.argwhere(np.isnan(codes))[0])
            self._first_nan = rows.start + row, column

    def faults(self, name: str) -> list[Fault]:
        """Codes that are no number, or that belong to scales half as large."""
        if self._first_nan is None:
            return self._half_used(name)
        number, (row, column) = int(self._counts[np.isnan(self._bins)].sum()), self._first_nan
        got = f"{number} NaN(s), first at row {row}, column {column}"
        return [Fault(where=name, expected="quantized values that are numbers", got=got)]

    def _half_used(self, name: str) -> list[Fault]:
        """With codes twice as large, scales half as large would hold the same weights exactly.

        So no rule chooses such scales. FP8 loses nothing by them.
        """
        largest, peak = float(np.nanmax(self._values)), float(self.peaks.max())
        if self._number.is_fp8 or not 0 < peak <= largest / 2:
            return []
        got = f"none beyond {peak:g} in the whole matrix"
        expected = f"codes up to {largest:g}, the end of the range, or near it"
        return [Fault(where=name, expected=expected, got=got)]

    def statistics(self, scale: Floats, peaks: Floats, *, concat: bool) -> CodeStatistics:
        """The figures; `peaks` has the shape of `scale`."""
        counts, bins, possible = self._counts, self._bins, self._values[~np.isnan(self._values)]
        total = int(counts.sum())
        ends = (bins == possible.min()) | (bins == possible.max())
        halves = self._zeros / (total / 2) if concat else None
        finite = scale[np.isfinite(scale)]
        used = peaks != 0
        top = _TOP_UNDER_POWERS if self._number.powers_of_two else self._number.largest
        return CodeStatistics(
            num_scales=scale.size,
            smallest_scale=float(finite.min()) if finite.size else None,
            largest_scale=float(finite.max()) if finite.size else None,
            saturated=int(counts[ends].sum()) / total,
            zero=int(self._zeros.sum()) / total,
            zero_halves=None if halves is None else (float(halves[0]), float(halves[1])),
            distinct=len(np.unique(bins[(counts > 0) & ~np.isnan(bins)])),
            possible=len(np.unique(possible)),
            scales_fit=float((peaks[used] >= top).mean()) if used.any() else None,
        )


def _per_scale(peaks: Floats, scheme: DeclaredScheme) -> Floats:
    """Largest magnitudes per group of a row -> per stored scale."""
    if scheme.granularity == "tensor":
        return np.full((1, 1), peaks.max())
    if scheme.granularity != "block":
        return peaks
    first_rows = np.arange(0, len(peaks), scheme.rows_of_scale)
    blocks: Floats = np.maximum.reduceat(peaks, first_rows, axis=0)
    return blocks


def _scale_faults(tensor: TensorInfo, scale: Floats, peaks: Floats) -> list[Fault]:
    """Scales that no engine can multiply codes with, or that some of them flush to zero."""
    bad = ~(np.isfinite(scale) & (scale > 0))
    smallest = _SMALLEST_NORMAL[tensor.dtype]
    subnormal = ~bad & (scale < smallest) & (peaks != 0)
    faults = []
    for wrong, expected in (
        (bad, "finite scales > 0"),
        (subnormal, f"normal numbers, >= {smallest:.3g}, over codes that are not all zero"),
    ):
        if wrong.any():
            row, group = map(int, np.argwhere(wrong)[0])
            got = f"{int(wrong.sum())} other(s), first {scale[row, group]} at row {row}"
            got += f", group {group}" if scale.shape[1] > 1 else ""
            faults.append(Fault(where=tensor.name, expected=expected, got=got))
    return faults
