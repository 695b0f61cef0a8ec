"""A history: one change after the other with its bounds and its limit, marked by its verdict."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .forest import Interval, domain
from .svg import WIDTH, Drawing, Mark, Scale, percent, ticks

_LEFT, _RIGHT, _TOP, _HEIGHT = 44.0, 10.0, 30.0, 190.0
_FEET = 34.0
_LABEL = 70.0
"""Room of a date."""
MARKS: Mapping[str, tuple[Mark, str]] = MappingProxyType(
    {
        "PASS": ("circle", "full"),
        "FAIL": ("square", "full"),
        "INCONCLUSIVE": ("diamond", "hollow"),
        "ANOMALOUS": ("triangle", "hollow"),
    }
)
"""Verdict -> shape and filling; the colour is that of the class with its name."""


def history(key: str, rows: Sequence[Interval], verdicts: Sequence[str], *, bounds: str) -> str:
    """Draw rows from left to right.

    Args:
        key: see `Drawing`.
        rows: at least one, the oldest first; their labels stand below them.
        verdicts: of each, a key of `MARKS`.
        bounds: what the lines are.

    Returns:
        The element `svg`.
    """
    pairs = list(zip(rows, verdicts, strict=True))
    described = "; ".join(_described(row, verdict) for row, verdict in pairs)
    title = "Change of the acceptance length, report by report"
    described = f"Lines are {bounds}. {described}."
    drawing = Drawing(key, _HEIGHT + _FEET, title=title, described=described)
    up = Scale(*domain(rows), _HEIGHT, _TOP)
    for value in ticks(up.low, up.high):
        drawing.line(_LEFT, up(value), WIDTH - _RIGHT, up(value), "grid" if value else "axis")
        drawing.text(_LEFT - 6, up(value) + 4, percent(value), "soft", "end")
    slot = (WIDTH - _LEFT - _RIGHT) / len(rows)
    every = max(1, -(-int(_LABEL) // max(1, int(slot))))
    for number, (row, verdict) in enumerate(pairs):
        left = _LEFT + slot * number
        _report(drawing, up, row, verdict, left, slot)
        if (len(rows) - 1 - number) % every == 0:  # the last one has its label
            middle = min(left + slot / 2, WIDTH - _RIGHT - _LABEL / 2 + 4)
            drawing.text(middle, _HEIGHT + 15, row.label, "soft", "middle")
    _legend(drawing, dict.fromkeys(verdicts))
    return drawing.to_text()


def _report(
    drawing: Drawing, up: Scale, row: Interval, verdict: str, left: float, slot: float
) -> None:
    middle = left + slot / 2
    if row.limit is not None:
        drawing.line(left, up.clipped(row.limit), left + slot, up.clipped(row.limit), "limit")
    if row.lower is not None and row.upper is not None:
        ends = up.clipped(row.lower), up.clipped(row.upper)
        drawing.line(middle, ends[0], middle, ends[1], f"span {verdict}")
        for end in ends:
            drawing.line(middle - 4, end, middle + 4, end, f"span {verdict}")
    mark, filling = MARKS[verdict]
    place = _HEIGHT if row.estimate is None else up.clipped(row.estimate)
    drawing.mark(mark, middle, place, f"{filling} {verdict}", 4.5)


def _legend(drawing: Drawing, verdicts: Mapping[str, None]) -> None:
    at = 6.0
    for verdict in (one for one in MARKS if one in verdicts):
        mark, filling = MARKS[verdict]
        drawing.mark(mark, at, 12, f"{filling} {verdict}", 4.5)
        drawing.text(at + 10, 16, verdict)
        at += 10 + drawing.text_width(verdict) + 16
    drawing.line(at, 12, at + 20, 12, "limit")
    drawing.text(at + 26, 16, "limit")


def _described(row: Interval, verdict: str) -> str:
    if row.estimate is None:
        return f"{row.label}: {verdict}, no change was measured"
    said = f"{row.label}: {verdict}, {row.estimate:+.2%}"
    if row.lower is not None and row.upper is not None:
        said += f" ({row.lower:+.2%} to {row.upper:+.2%})"
    return said
