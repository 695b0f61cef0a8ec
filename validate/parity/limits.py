"""A figure with its bounds against what it may be: the one rule of the checks of parity.

PASS          both bounds are within the limits
FAIL          a limit lies beyond both bounds
INCONCLUSIVE  neither, or no limit was given, or too few prompts to say
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..counting.jackknife import Bounded
from ..errors import ParityError
from ..judging.verdict import Verdict
from .finding import CheckName, Finding

MIN_PROMPTS = 30
"""Distinct ones, as `release` asks for; fewer, and a few odd ones make bounds too narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a figure may be, in its own unit.

    Attributes:
        option: of the command line that gives them.
        least, most: inclusive; None = any.
    """

    option: str
    least: float | None = None
    most: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything to hold the figure against."""
        return self.least is not None or self.most is not None


def limits(
    option: str,
    value: float | None,
    *,
    of: tuple[float, float] = (0, math.inf),
    least: float | None = None,
    most: float | None = None,
) -> Limits:
    """Limits of one option.

    Args:
        value: as given; None = not given: no limits.
        of: between which it lies.
        least: sign of the limit below, in units of `value`: 1 or -1; None = no such limit.

    Raises:
        ParityError: the value is out of range.
    """
    if value is None:
        return Limits(option=option)
    if not of[0] <= value <= of[1] or math.isinf(value):
        wanted = f"at least {of[0]:g}" if math.isinf(of[1]) else f"from {of[0]:g} to {of[1]:g}"
        raise ParityError(option, f"expected a number {wanted}, got {value}",
                          fix="1 % is written 0.01")  # fmt: skip
    return Limits(
        option=option,
        least=None if least is None else least * value,
        most=None if most is None else most * value,
    )


def judged(
    check: CheckName,
    what: str,
    found: Bounded,
    allowed: Limits,
    *,
    unit: str = "prompts",
    min_clusters: int = MIN_PROMPTS,
    remedy: str = "measure more prompts",
    details: Sequence[Mapping[str, object]] = (),
) -> Finding:
    """A finding about one figure.

    Args:
        check: see `Finding`.
        what: see `Finding`.
        allowed: what it may be.
        unit: what a cluster is, in words.
        remedy: what would settle it where the limit lies between the bounds.
    """
    verdict, why = _verdict(found, allowed, unit, min_clusters, remedy)
    bounds = f", bounds {found.lower:.4g} and {found.upper:.4g}" if found.has_spread else ""
    return Finding(
        check=check,
        what=what,
        estimate=found.estimate,
        lower=found.lower if found.has_spread else None,
        upper=found.upper if found.has_spread else None,
        confidence=found.confidence if found.has_spread else None,
        threshold=allowed.most if allowed.least is None else allowed.least,
        verdict=verdict,
        reason=f"{found.estimate:.4g}{bounds}, over {found.num_clusters:,} {unit}: {why}.",
        details=tuple(details),
    )


def _verdict(
    found: Bounded, allowed: Limits, unit: str, min_clusters: int, remedy: str
) -> tuple[Verdict, str]:
    if not allowed.given:
        return "INCONCLUSIVE", f"no threshold was given ({allowed.option})"
    if found.num_clusters < min_clusters:
        return "INCONCLUSIVE", f"expected at least {min_clusters} {unit}"
    least = -math.inf if allowed.least is None else allowed.least
    most = math.inf if allowed.most is None else allowed.most
    named = " and ".join(f"{x:.4g}" for x in (allowed.least, allowed.most) if x is not None)
    if least <= found.lower and found.upper <= most:
        return "PASS", f"its bounds clear the limit {named} ({allowed.option})"
    if found.upper < least or most < found.lower:
        return "FAIL", f"both bounds are beyond the limit {named} ({allowed.option})"
    return (
        "INCONCLUSIVE",
        f"the limit {named} ({allowed.option}) lies between the bounds, so these items do not"
        f" decide: {remedy}",
    )
