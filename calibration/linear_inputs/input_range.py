"""How large the inputs of one linear are: a sketch that is small, streamed and mergeable.

Magnitudes are counted in bins of a 64th of an octave, 1.1 % wide, from 2^-40 to 2^24; absmax and
number are exact. Sketches of parts add up to the sketch of the whole.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...recipes.formats import NUMBER_FORMATS

FP8_MAX = NUMBER_FORMATS["fp8_e4m3"].largest
FP8_NORMAL = 2.0**-6
"""Smallest normal magnitude of FP8 E4M3: below it the precision is absolute, no longer relative."""

_LOWEST, _HIGHEST, _PER_OCTAVE = -40, 24, 64
_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE
_OCTAVES_SEARCHED = 8
_SCALES_PER_OCTAVE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRange:
    """Magnitudes of some inputs.

    Attributes:
        bins: [4096] int64, how many magnitudes lie in each bin; those below 2^-40, zeros among
            them, are in none, those above 2^24 in the last.
        num_small: of those in none.
        absmax: the largest. sum_squares: of all.
    """

    bins: Tensor
    num_small: int
    absmax: float
    sum_squares: float

    @classmethod
    def of(cls, x: Tensor) -> "InputRange":
        """Of all elements of a tensor, any shape."""
        size = x.detach().abs().flatten().float()
        octaves = size.clamp(min=2.0 ** (_LOWEST - 1)).log2()
        index = ((octaves - _LOWEST) * _PER_OCTAVE).floor().long()
        counts = torch.bincount(index[index >= 0].clamp(max=_BINS - 1), minlength=_BINS)
        return cls(
            bins=counts.cpu(),
            num_small=int((index < 0).sum()),
            absmax=float(size.max()) if size.numel() else 0.0,
            sum_squares=float(size.double().square().sum()),
        )

    def __add__(self, other: "InputRange") -> "InputRange":
        return InputRange(
            bins=self.bins + other.bins,
            num_small=self.num_small + other.num_small,
            absmax=max(self.absmax, other.absmax),
            sum_squares=self.sum_squares + other.sum_squares,
        )

    @property
    def count(self) -> int:
        """Elements seen."""
        return int(self.bins.sum()) + self.num_small

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return math.sqrt(self.sum_squares / max(1, self.count))

    def percentile(self, share: float) -> float:
        """The magnitude that a share of all elements does not exceed, at most 1.1 % too large.

        Args:
            share: in (0, 1].
        """
        reached = self.bins.cumsum(0) + self.num_small >= share * self.count
        if self.num_small >= share * self.count:
            return 0.0
        upper = math.exp2(_LOWEST + (int(reached.int().argmax()) + 1) / _PER_OCTAVE)
        return min(upper, self.absmax)

    def share_below(self, magnitude: float) -> float:
        """Share of the sum of squares that elements below a magnitude have, in [0, 1]."""
        squares = self.bins * _centres() ** 2
        total = float(squares.sum())
        return float(squares[_centres() < magnitude].sum()) / total if total else 0.0

    def fp8_error(self, scale: float) -> float:
        """Error of rounding x / scale to FP8 E4M3, clipped at 448: sum of squares over that of x.

        Estimated from bin centres, eight to the finest step of FP8: 2 % too small.

        Args:
            scale: positive.
        """
        x = _centres()
        codes = (x / scale).clamp(max=FP8_MAX).to(torch.float32).to(torch.float8_e4m3fn)
        error = codes.double() * scale - x
        total = float((self.bins * x**2).sum())
        return float((self.bins * error**2).sum()) / total if total else 0.0

    def best_fp8_scale(self) -> float:
        """The scale of the smallest `fp8_error`, of 64 from absmax / 448 down to a 256th of it."""
        if self.absmax == 0:
            return 1.0
        largest = self.absmax / FP8_MAX
        steps = range(_OCTAVES_SEARCHED * _SCALES_PER_OCTAVE)
        scales = [largest * math.exp2(-i / _SCALES_PER_OCTAVE) for i in steps]
        return min(scales, key=self.fp8_error)


@functools.cache
def _centres() -> Tensor:
    """[4096] float64, the geometric centre of each bin."""
    index = torch.arange(_BINS, dtype=torch.float64)
    return 2.0 ** (_LOWEST + (index + 0.5) / _PER_OCTAVE)
