"""The algorithm of a recipe: how scales are chosen, weights rounded, and what else changes."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from .formats import NUMBER_FORMATS, Granularity, WeightDtype

ScaleChoice = Literal["absmax", "mse"]
RoundingChoice = Literal["nearest", "gptq", "learned"]
InputCorrection = Literal["auto", "off"]
NormChoice = Literal["kept", "learned"]
CORRECTED: Collection[RoundingChoice] = ("gptq", "learned")
"""Roundings that can correct weights for the rounding of their inputs."""


class Weights(Protocol):
    """What an algorithm asks of a `WeightFormat`."""

    @property
    def dtype(self) -> WeightDtype:
        """Of the codes."""

    @property
    def granularity(self) -> Granularity:
        """Of the scales."""

    @property
    def first_stage(self) -> str | None:
        """What the codes are taken of; None = the weight itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How scales are chosen and codes are rounded.

    Attributes:
        scale: absmax: the largest magnitude fits; mse: the one that leaves the smallest squared
            error of the weights, each counted by the mean square of its inputs where `rounding`
            measures these; FP4 is not clipped. Where rounding is learned, scales start there.
        rounding: nearest; gptq: column by column, each making up for the errors of those before it
            on the inputs that calibration traces show; learned: what brings the whole draft's
            output closest to that of the BF16 draft along these traces, scales with it.
        balance_concat: auto: where the halves of EAGLE-3's concat input differ by 4 or more, the
            columns of the embedding half are multiplied by a power of two, and the norm before
            them is divided by it: exact, and both halves then share a scale.
        input_correction: auto: where inputs are rounded to four bits when served, GPTQ aims at what
            the weight makes of the unrounded ones, and learning starts there; off: at what the
            weight makes of the rounded ones.
        norms: learned: the weights of the norms in front of quantized linears learn with the codes;
            kept: they are those of the source.
    """

    scale: ScaleChoice
    rounding: RoundingChoice
    balance_concat: Literal["auto", "off"] = "off"
    input_correction: InputCorrection = "off"
    norms: NormChoice = "kept"

    def problem(self) -> str | None:
        """What makes this combination impossible, or None."""
        if self.norms == "learned" and self.rounding != "learned":
            return "norms: they learn with 'rounding: learned' alone: leave it out"
        if self.input_correction == "auto" and self.rounding not in CORRECTED:
            either = " or ".join(map(repr, CORRECTED))
            return (
                f"input_correction: leave it out: only rounding {either} measures"
                " what rounding the inputs changes"
            )
        return None

    def __str__(self) -> str:
        corrected = ", corrected for rounded inputs" if self.input_correction == "auto" else ""
        return f"scale {self.scale}, rounding {self.rounding}{corrected}"

    def of(self, weights: Weights) -> "Algorithm":
        """What it does where these weights are some of several formats.

        Those that it cannot search or has nothing to win with get absmax scales and nearest codes.
        """
        searched = weights.granularity in ("channel", "group") and weights.first_stage is None
        fine = NUMBER_FORMATS[weights.dtype].bits >= 8
        if (self.scale == "mse" and not searched) or (self.rounding != "nearest" and fine):
            return self.rounded("nearest", scale="absmax")
        return self

    def rounded(self, rounding: RoundingChoice, *, scale: ScaleChoice | None = None) -> "Algorithm":
        """The same with another rounding, which may have no use for what another one asks for."""
        return dataclasses.replace(
            self,
            scale=scale or self.scale,
            rounding=rounding,
            input_correction=self.input_correction if rounding in CORRECTED else "off",
            norms=self.norms if rounding == "learned" else "kept",
        )

    @property
    def to_nearest(self) -> "Algorithm":
        """The same without looking at inputs."""
        return self.rounded("nearest")

    @property
    def name(self) -> str:
        """The one of `ALGORITHMS` that it is, or both its parts."""
        pair = self.scale, self.rounding
        return next((n for n, known in ALGORITHMS.items() if known == pair), ", ".join(pair))


ALGORITHMS: Mapping[str, tuple[ScaleChoice, RoundingChoice]] = {
    "absmax": ("absmax", "nearest"),
    "mse": ("mse", "nearest"),
    "gptq": ("mse", "gptq"),
    "learned": ("mse", "learned"),
}
"""Scale and rounding that go together, by the name that the command line has for them."""
