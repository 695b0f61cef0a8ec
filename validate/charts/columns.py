"""Columns of changes: several series side by side at each of a few settings, with their bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from .forest import Interval, domain
from .svg import MARKS, WIDTH, Drawing, Scale, percent, ticks

_LEFT, _RIGHT, _HEIGHT, _LINE = 44.0, 10.0, 200.0, 14.0
_APART = 13.0
"""Between the series of a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One setting.

    Attributes:
        labels: lines below it, the first one names it.
        rows: of each series; None = it has none here.
    """

    labels: tuple[str, ...]
    rows: tuple[Interval | None, ...]


def columns(
    key: str,
    settings: Sequence[Column],
    series: Sequence[str],
    *,
    title: str,
    bounds: str,
    foot: str,
) -> str:
    """Draw settings from left to right.

    Args:
        key: see `Drawing`.
        settings: at least one, with a row of at least one series.

    Returns:
        The element `svg`.
    """
    top = 14.0 + 17 * len(series)
    bottom = top + _HEIGHT
    below = bottom + _LINE * (1 + max(len(one.labels) for one in settings))
    height = below + 6
    drawing = Drawing(key, height, title=title, described=_described(settings, series, bounds))
    up = Scale(*domain([row for one in settings for row in one.rows if row]), bottom, top)
    for value in ticks(up.low, up.high):
        drawing.line(_LEFT, up(value), WIDTH - _RIGHT, up(value), "grid" if value else "axis")
        drawing.text(_LEFT - 6, up(value) + 4, percent(value), "soft", "end")
    slot = (WIDTH - _LEFT - _RIGHT) / len(settings)
    for number, one in enumerate(settings):
        middle = _LEFT + slot * (number + 0.5)
        for place, row in enumerate(one.rows):
            if row is not None:
                _row(drawing, up, row, middle + _APART * (place - (len(series) - 1) / 2), place)
        for line, text in enumerate(one.labels):
            look = "soft" if line else "strong"
            drawing.text(middle, bottom + _LINE * (line + 1), text, look, "middle")
    drawing.text(WIDTH - _RIGHT, below, foot, "soft", "end")
    for place, name in enumerate(series):
        drawing.mark(MARKS[place % len(MARKS)], _LEFT, 8 + 17 * place, f"full {_colour(place)}")
        drawing.text(_LEFT + 10, 12 + 17 * place, name)
    return drawing.to_text()


def _row(drawing: Drawing, up: Scale, row: Interval, x: float, place: int) -> None:
    if row.estimate is None:
        return
    if row.lower is not None and row.upper is not None:
        ends = up.clipped(row.lower), up.clipped(row.upper)
        drawing.line(x, ends[0], x, ends[1], f"span {_colour(place)}")
        for end in ends:
            drawing.line(x - 3, end, x + 3, end, f"span {_colour(place)}")
    mark = MARKS[place % len(MARKS)]
    drawing.mark(mark, x, up.clipped(row.estimate), f"full {_colour(place)}", 3.5)


def _colour(place: int) -> str:
    return f"other-{place % 4 + 1}"


def _described(settings: Sequence[Column], series: Sequence[str], bounds: str) -> str:
    said = [f"Lines are {bounds}."]
    for one in settings:
        of_each = [
            f"{name} {row.estimate:+.2%}"
            + (
                f" ({row.lower:+.2%} to {row.upper:+.2%})"
                if row.lower is not None and row.upper is not None
                else ""
            )
            for name, row in zip(series, one.rows, strict=True)
            if row is not None and row.estimate is not None
        ]
        said.append(f"{', '.join(one.labels)}: {'; '.join(of_each)}.")
    return " ".join(said)
