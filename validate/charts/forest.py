"""A forest plot: changes with their bounds, a row each, beside the limits that they must clear."""

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import MARKS, WIDTH, Drawing, Mark, Scale, percent, ticks

_ROW, _TOP, _LABELS, _RIGHT = 21.0, 22.0, 112.0, 17.0
_TICKS = 7
_FOOT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One row; numbers are relative changes, such as -0.01.

    Attributes:
        estimate: None = there is none, and the row says so.
        lower, upper: its bounds.
        limit: below which it must not fall; None = there is none.
        whole: of everything, and not of a part. judged: it counts for a verdict.
        series: 0 for one series; else which of several it is.
    """

    label: str
    estimate: float | None
    lower: float | None = None
    upper: float | None = None
    limit: float | None = None
    whole: bool = False
    judged: bool = True
    series: int = 0


def forest(
    key: str, rows: Sequence[Interval], *, title: str, bounds: str, series: Sequence[str] = ()
) -> str:
    """Draw rows from top to bottom.

    Args:
        key: see `Drawing`.
        rows: at least one.
        bounds: what the lines are, such as "one-sided 95% bounds".
        series: names of several series; none for one.

    Returns:
        The element `svg`.
    """
    names = 18.0 * len(series) if len(series) > 1 else 0.0
    height = _TOP + names + _ROW * len(rows) + _FOOT + 14
    drawing = Drawing(key, height, title=title, described=_described(rows, bounds))
    scale = Scale(*domain(rows), _LABELS + 8, WIDTH - _RIGHT)
    _legend(drawing, rows, bounds, series)
    top = _TOP + names
    bottom = top + _ROW * len(rows)
    for value in ticks(scale.low, scale.high, _TICKS):
        drawing.line(scale(value), top, scale(value), bottom, "axis" if not value else "grid")
        drawing.text(scale(value), bottom + 15, percent(value), "soft", "middle")
    drawing.text(WIDTH - _RIGHT, bottom + 29, "change of the acceptance length", "soft", "end")
    for number, row in enumerate(rows):
        if number and series and row.label:
            drawing.line(0, top + _ROW * number, WIDTH, top + _ROW * number, "grid")
        _row(drawing, scale, row, top + _ROW * (number + 0.5), series)
    return drawing.to_text()


def _row(drawing: Drawing, scale: Scale, row: Interval, y: float, series: Sequence[str]) -> None:
    weight = "strong" if row.whole else ""
    if row.label:
        drawing.label(_LABELS, y + 4, row.label, _LABELS, weight)
    if row.limit is not None:
        x = scale.clipped(row.limit)
        drawing.line(x, y - _ROW / 2 + 1, x, y + _ROW / 2 - 1, "limit")
    if row.estimate is None:
        drawing.text(WIDTH - _RIGHT, y + 4, "no bounds", "soft", "end")
        return
    colour = f"other-{row.series % 4 + 1}" if series else "candidate"
    look = f"{colour}{'' if row.judged else ' unjudged'}"
    if row.lower is not None and row.upper is not None:
        left, right = scale.clipped(row.lower), scale.clipped(row.upper)
        drawing.line(left, y, right, y, f"span {look}")
        for value, x, way in ((row.lower, left, -1), (row.upper, right, 1)):
            if scale.holds(value):
                drawing.line(x, y - 4, x, y + 4, f"span {look}")
            else:  # it goes on beyond the edge
                tip = [(x, y), (x - 6 * way, y - 4), (x - 6 * way, y + 4)]
                drawing.polygon(tip, f"full {look}")
    kind = _mark(row.series) if series else "diamond" if row.whole else "circle"
    fill = "full" if row.judged else "hollow"
    drawing.mark(kind, scale.clipped(row.estimate), y, f"{fill} {look}")


def _legend(drawing: Drawing, rows: Sequence[Interval], bounds: str, series: Sequence[str]) -> None:
    drawing.line(2, 10, 26, 10, "span" if series else "span candidate")
    drawing.text(32, 14, bounds)
    at = 32 + drawing.text_width(bounds) + 14
    if any(row.limit is not None for row in rows):
        drawing.line(at, 2, at, 18, "limit")
        drawing.text(at + 8, 14, "limit")
        at += 58
    if not series and not all(row.judged for row in rows):
        drawing.mark("circle", at, 10, "hollow candidate unjudged")
        drawing.text(at + 10, 14, "not judged")
    if len(series) > 1:
        for number, name in enumerate(series):
            y = _TOP + 18 * number + 6
            drawing.mark(_mark(number), 14, y, f"full other-{number % 4 + 1}")
            drawing.text(32, y + 4, name if len(name) < 56 else f"{name[:55]}…")


def _mark(series: int) -> Mark:
    """With its colour, of sixteen series each has its own."""
    return MARKS[(series + series // 4) % 4]


def domain(rows: Sequence[Interval]) -> tuple[float, float]:
    """What an axis shows: limits, estimates, and bounds; wide bounds of few prompts are cut."""
    limits = [row.limit for row in rows if row.limit is not None]
    estimates = [row.estimate for row in rows if row.estimate is not None]
    counted = [row for row in rows if row.judged and row.lower is not None]
    bounds = [x for row in counted for x in (row.lower, row.upper) if x is not None]
    near = [0.0, *limits, *estimates, *bounds]
    room = max(0.002, *(abs(x) for x in (*limits, *estimates, 0.0)))
    low, high = min(near), max(max(near), 0.4 * room)
    margin = 0.12 * (high - low)
    return low - margin, high + margin


def _described(rows: Sequence[Interval], bounds: str) -> str:
    parts = [_said(row) for row in rows]
    return f"Lines are {bounds}. " + "; ".join(parts) + "."


def _said(row: Interval) -> str:
    if row.estimate is None:
        return f"{row.label}: too few prompts"
    said = f"{row.label}: {row.estimate:+.2%}"
    if row.lower is not None and row.upper is not None:
        said += f" ({row.lower:+.2%} to {row.upper:+.2%})"
    return said
