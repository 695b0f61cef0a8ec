"""Changes with their bounds, and counts of two drafts by position, context and prompt.

The baseline is a circle, a solid line, a solid bar; the candidate a square, a dashed
line, a hatched bar. The key of a chart tells it from the others of its page.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .svg import MARKS, WIDTH, Drawing, Mark, Scale, percent, ticks
from .words import SideNames

_ROW, _TOP, _LABELS, _RIGHT = 21.0, 22.0, 112.0, 17.0
_TICKS = 7
_FOOT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One row of relative changes; without an estimate it says so, and only judged ones count."""

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
    """The element `svg`: rows from top to bottom, beside the limits that they must clear."""
    names = 18.0 * len(series) if len(series) > 1 else 0.0
    height = _TOP + names + _ROW * len(rows) + _FOOT + 14
    figures = "; ".join(_in_figures(row, series) for row in rows)
    drawing = Drawing(key, height, title=title, described=f"Lines are {bounds}. {figures}.")
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
            else:  # the interval continues beyond the edge
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
    """A mark with its colour; each of sixteen series has its own."""
    return MARKS[(series + series // 4) % 4]


def domain(rows: Sequence[Interval]) -> tuple[float, float]:
    """What an axis shows: limits, estimates and bounds; wide bounds of few prompts are cut."""
    limits = [row.limit for row in rows if row.limit is not None]
    estimates = [row.estimate for row in rows if row.estimate is not None]
    counted = [row for row in rows if row.judged and row.lower is not None]
    bounds = [x for row in counted for x in (row.lower, row.upper) if x is not None]
    near = [0.0, *limits, *estimates, *bounds]
    room = max(0.002, *(abs(x) for x in (*limits, *estimates, 0.0)))
    low, high = min(near), max(max(near), 0.4 * room)
    margin = 0.12 * (high - low)
    return low - margin, high + margin


def _in_figures(row: Interval, series: Sequence[str]) -> str:
    name = ", ".join(filter(None, (row.label, *series[row.series :][:1])))
    if row.estimate is None:
        return f"{name}: too few prompts"
    both = row.lower is not None and row.upper is not None
    bounds = f" ({row.lower:+.2%} to {row.upper:+.2%})" if both else ""
    return f"{name}: {row.estimate:+.2%}{bounds}"


_EDGE = 10.0


def _rungs(drawing: Drawing, up: Scale, left: float, written: Callable[[float], str]) -> None:
    for value in ticks(up.low, up.high):
        drawing.line(left, up(value), WIDTH - _EDGE, up(value), "grid" if value else "axis")
        drawing.text(left - 6, up(value) + 4, written(value), "soft", "end")


_LEFT, _UPPER, _LOWER = 40.0, 30.0, 210.0
_FEET = 34.0
_MOST_DOTS = 2000
_LOOKS: tuple[tuple[str, Mark, str], ...] = (
    ("baseline", "circle", "full"),
    ("candidate", "square", "hollow"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Acceptance lengths under both drafts, in a context bin such as 1k-4k or of a prompt."""

    label: str
    baseline: float
    candidate: float
    category: str = ""
    steps: float = 0

    @property
    def change(self) -> float:
        """Candidate / baseline - 1."""
        return self.candidate / self.baseline - 1


def contexts(bins: Sequence[Lengths], sides: SideNames) -> str:
    """The acceptance length by the number of tokens before a step, for at least two bins."""
    figures = "; ".join(f"{b.label}: {b.baseline:.4f} and {b.candidate:.4f}" for b in bins)
    title = "Acceptance length by tokens before the verify step"
    described = f"{sides.first} and {sides.second} by context: {figures}."
    drawing = Drawing("contexts", _LOWER + _FEET, title=title, described=described)
    highest = max(max(b.baseline, b.candidate) for b in bins)
    up = Scale(1, 1 + 1.04 * max(highest - 1, 0.01), _LOWER, _UPPER)
    _rungs(drawing, up, _LEFT, "{:g}".format)
    across = Scale(0, len(bins) - 1, _LEFT + 34, WIDTH - _EDGE - 34)
    labels = {number - 1: bins[number - 1].label for number in _thinned(len(bins), most=8)}
    both = ([b.baseline for b in bins], [b.candidate for b in bins])
    foot = "tokens before the verify step"
    return _curves(drawing, across, up, both, labels, foot, sides)


def positions(both: Sequence[Sequence[float]], sides: SideNames) -> str:
    """The share of the steps, [K] in [0, 1], that accepted at least each number of tokens."""
    count = min(map(len, both))
    title = "Share of steps that accepted the drafted token at each position"
    described = _by_number(both, sides, first=1)
    drawing = Drawing("positions", _LOWER + _FEET, title=title, described=described)
    inner = 14.0 if count > 1 else (WIDTH - _LEFT - _EDGE) / 2
    across = Scale(1, max(count, 2), _LEFT + inner, WIDTH - _EDGE - 14)
    up = _share_axis(drawing, 1.0)
    labels = {number: str(number) for number in _thinned(count)}
    foot = "position of the drafted token"
    return _curves(drawing, across, up, both, labels, foot, sides, first=1)


def histogram(steps: Sequence[Sequence[float]], sides: SideNames) -> str:
    """The share of the steps, [K + 1] with at least one, that accepted exactly each number."""
    both = [[count / sum(counts) for count in counts] for counts in steps]
    title = "Share of steps by number of accepted draft tokens"
    described = _by_number(both, sides, first=0)
    drawing = Drawing("histogram", _LOWER + _FEET, title=title, described=described)
    up = _share_axis(drawing, max(map(max, both)))
    count = min(map(len, both))
    slot = (WIDTH - _LEFT - _EDGE) / count
    wide = min(34.0, 0.38 * slot)
    labelled = _thinned(count)
    for i, shares in enumerate(zip(*both, strict=True)):
        middle = _LEFT + slot * (i + 0.5)
        for share, look, x in (
            (shares[0], "baseline", middle - wide - 0.02 * slot),
            (shares[1], "candidate", middle + 0.02 * slot),
        ):
            height = _LOWER - up(share)
            drawing.bar(x, up(share), wide, height, look, hatched=look == "candidate")
        if i + 1 in labelled:
            drawing.text(middle, _LOWER + 15, str(i), "soft", "middle")
    drawing.text(WIDTH - _EDGE, _LOWER + 30, "accepted draft tokens in a step", "soft", "end")
    _legend_of_two(drawing, sides)
    return drawing.to_text()


def scatter(dots: Sequence[Lengths], sides: SideNames, *, limit: float) -> str:
    """Prompts by their acceptance length under both drafts, beside the allowed drop."""
    shown, most = dots[:: -(-len(dots) // _MOST_DOTS)], max(dot.steps for dot in dots)
    below = sum(dot.candidate < dot.baseline for dot in dots)
    above = sum(dot.candidate > dot.baseline for dot in dots)
    described = (
        f"{len(dots)} prompts: {below} accept less {sides.second}, {above} more,"
        f" {len(dots) - below - above} the same."
    )
    if len(shown) < len(dots):
        described += f" {len(shown)} of them are drawn, evenly chosen."
    title = f"Acceptance length of every prompt {sides.both}"
    side = WIDTH - _LEFT - _EDGE
    bottom = _UPPER + side
    drawing = Drawing("scatter", bottom + _FEET, title=title, described=described)
    lengths = [length for dot in dots for length in (dot.baseline, dot.candidate)]
    margin = 0.06 * max(max(lengths) - min(lengths), 0.2)
    low, high = min(lengths) - margin, max(lengths) + margin
    across, up = Scale(low, high, _LEFT, _LEFT + side), Scale(low, high, bottom, _UPPER)
    for value in ticks(low, high):
        drawing.line(across(value), _UPPER, across(value), bottom, "grid")
        drawing.line(_LEFT, up(value), WIDTH - _EDGE, up(value), "grid")
        drawing.text(across(value), bottom + 15, f"{value:g}", "soft", "middle")
        drawing.text(_LEFT - 6, up(value) + 4, f"{value:g}", "soft", "end")
    drawing.line(across(low), up(low), across(high), up(high), "same")
    kept = 1 - limit
    if high * kept > low:  # a line below the chart is not drawn
        drawing.line(across(low / kept), up(low), across(high), up(high * kept), "limit")
    for dot in shown:
        size = 2 + 4 * (dot.steps / most) ** 0.5
        drawing.mark("circle", across(dot.baseline), up(dot.candidate), "dot candidate", size)
    drawing.line(_LEFT, 12, _LEFT + 24, 12, "same")
    drawing.text(_LEFT + 30, 16, "equal")
    drawing.line(_LEFT + 76, 12, _LEFT + 100, 12, "limit")
    drawing.text(_LEFT + 106, 16, "limit of the whole")
    drawing.text(WIDTH - _EDGE, bottom + 30, f"{sides.first}, acceptance length", "soft", "end")
    drawing.text(WIDTH - _EDGE, 16, f"↑ {sides.second}", "soft", "end")
    return drawing.to_text()


def _curves(
    drawing: Drawing,
    across: Scale,
    up: Scale,
    both: Sequence[Sequence[float]],
    labels: Mapping[int, str],
    foot: str,
    sides: SideNames,
    first: int = 0,
) -> str:
    for i, label in labels.items():
        drawing.text(across(i), _LOWER + 15, label, "soft", "middle")
    drawing.text(WIDTH - _EDGE, _LOWER + 30, foot, "soft", "end")
    for values, (look, mark, fill) in zip(both, _LOOKS, strict=True):
        places = [(across(i), up(value)) for i, value in enumerate(values, first)]
        drawing.curve(places, look)
        for x, y in places:
            drawing.mark(mark, x, y, f"{fill} {look}", 3.6)
    _legend_of_two(drawing, sides)
    return drawing.to_text()


def _share_axis(drawing: Drawing, highest: float) -> Scale:
    scale = Scale(0, max(highest, 0.01) * 1.04, _LOWER, _UPPER)
    _rungs(drawing, scale, _LEFT, lambda value: f"{100 * value:.3g}%")
    return scale


def _legend_of_two(drawing: Drawing, sides: SideNames) -> None:
    at = _LEFT
    for name, (look, mark, fill) in zip(sides[:2], _LOOKS, strict=True):
        drawing.curve([(at, 12), (at + 24, 12)], look)
        drawing.mark(mark, at + 12, 12, f"{fill} {look}", 3.6)
        drawing.text(at + 31, 16, name)
        at += 31 + drawing.text_width(name) + 18


def _thinned(count: int, most: int = 17) -> range:
    """Those of 1 .. count that have room for their numbers."""
    return range(1, count + 1, -(-count // most))


def _by_number(both: Sequence[Sequence[float]], sides: SideNames, *, first: int) -> str:
    pairs = enumerate(zip(*both, strict=True), first)
    figures = "; ".join(f"{i}: {b:.1%} and {q:.1%}" for i, (b, q) in pairs)
    return f"{sides.first} and {sides.second} by number: {figures}."
