"""Bars beside each other: one number for each row, the first one being what is measured against."""

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import WIDTH, Drawing, Scale

_ROW, _LABELS, _HEIGHT = 24.0, 124.0, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: at least 0, and how it is written."""

    label: str
    value: float
    text: str


def bars(key: str, rows: Sequence[Bar], *, title: str) -> str:
    """Draw bars from top to bottom, the first one full, the others hatched.

    Args:
        key: see `Drawing`.
        rows: at least one, of which one is above 0.
        title: of the chart.

    Returns:
        The element `svg`.
    """
    said = "; ".join(f"{row.label}: {row.text}" for row in rows)
    drawing = Drawing(key, _ROW * len(rows) + 8, title=title, described=f"{said}.")
    scale = Scale(0, max(row.value for row in rows), _LABELS + 8, WIDTH - 4)
    for number, row in enumerate(rows):
        top = 4 + _ROW * number
        middle = top + _ROW / 2 + 4
        look = "candidate" if number else "baseline"
        width = scale(row.value) - scale(0)
        drawing.label(_LABELS, middle, row.label, _LABELS, "" if number else "strong")
        y = top + (_ROW - _HEIGHT) / 2
        drawing.bar(scale(0), y, width, _HEIGHT, look, hatched=bool(number))
        drawing.plate(scale(0) + 4, middle, row.text)
    return drawing.to_text()
