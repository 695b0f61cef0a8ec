"""The curve as a picture: change of the acceptance length by the number of rows (SVG)."""

from collections.abc import Sequence

from ..charts.columns import Column, columns
from ..charts.forest import Interval
from ..charts.svg import standalone
from ..judging.verdict import in_percent
from .size_curve import SizeChange, SizeCurve


def drawing(curve: SizeCurve, name: str) -> str:
    """A file of its own.
    """
    series = ["rows chosen by all categories", "its worst category"]
    if curve.off_domain is not None:
        series += ["rows chosen by other categories", "its worst category"]
    return standalone(
        columns(
            "sizes",
            [_column(curve, place) for place in range(len(curve.sizes))],
            series,
            title=f"{name}: change of the acceptance length by rows of the head",
            bounds=f"{in_percent(curve.confidence)} intervals that hold together",
            foot="rows of the head; share of the held-out tokens that have one",
        )
    )


def _column(curve: SizeCurve, place: int) -> Column:
    ways = [curve.chosen, *([curve.off_domain] if curve.off_domain else [])]
    found: list[SizeChange | None] = []
    for way in ways:
        found += [way.whole[place], way.worst(place)]
    covered = curve.chosen.whole[place].coverage
    labels = (f"{curve.sizes[place]:,}", f"{covered:.2%}")
    return Column(labels=labels, rows=_intervals(found))


def _intervals(changes: Sequence[SizeChange | None]) -> tuple[Interval | None, ...]:
    return tuple(
        None
        if one is None
        else Interval(
            label=one.scope,
            estimate=one.relative_change,
            # Bounds of a category of few prompts are wide, and would flatten everything.
            lower=one.lower if place % 2 == 0 else None,
            upper=one.upper if place % 2 == 0 else None,
        )
        for place, one in enumerate(changes)
    )
