"""What was counted of two drafts: acceptance by position and context, accepted tokens, prompts.

The baseline is a circle, a full line, a full bar; the candidate a square, a dashed line, hatched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import WIDTH, Drawing, Mark, Scale, ticks

_LEFT, _RIGHT, _TOP, _HEIGHT = 40.0, 10.0, 30.0, 210.0
_FEET = 34.0
_MOST_DOTS = 2000
_LOOKS: tuple[tuple[str, Mark, str], ...] = (
    ("baseline", "circle", "full"),
    ("candidate", "square", "hollow"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One prompt: acceptance lengths under both drafts, and its share of the most steps."""

    baseline: float
    candidate: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """One context bin, such as 1k-4k: acceptance lengths under both drafts."""

    label: str
    baseline: float
    candidate: float


def contexts(key: str, bins: Sequence[ContextLength], *, names: tuple[str, str]) -> str:
    """Draw the acceptance length by the number of tokens before a verify step.

    Args:
        key: see `Drawing`.
        bins: at least two, the shortest context first.

    Returns:
        The element `svg`.
    """
    said = "; ".join(f"{one.label}: {one.baseline:.4f} and {one.candidate:.4f}" for one in bins)
    title = "Acceptance length by tokens before the verify step"
    described = f"{names[0]} and {names[1]} by context: {said}."
    drawing = Drawing(key, _HEIGHT + _FEET, title=title, described=described)
    highest = max(max(one.baseline, one.candidate) for one in bins)
    up = Scale(1, 1 + 1.04 * max(highest - 1, 0.01), _HEIGHT, _TOP)
    for value in ticks(1, up.high):
        drawing.line(_LEFT, up(value), WIDTH - _RIGHT, up(value), "grid")
        drawing.text(_LEFT - 6, up(value) + 4, f"{value:g}", "soft", "end")
    across = Scale(0, len(bins) - 1, _LEFT + 34, WIDTH - _RIGHT - 34)
    for i in {number - 1 for number in _thinned(len(bins), most=8)}:
        drawing.text(across(i), _HEIGHT + 15, bins[i].label, "soft", "middle")
    drawing.text(WIDTH - _RIGHT, _HEIGHT + 30, "tokens before the verify step", "soft", "end")
    both = ([one.baseline for one in bins], [one.candidate for one in bins])
    for lengths, (look, mark, fill) in zip(both, _LOOKS, strict=True):
        places = [(across(i), up(length)) for i, length in enumerate(lengths)]
        drawing.curve(places, look)
        for x, y in places:
            drawing.mark(mark, x, y, f"{fill} {look}", 3.6)
    _legend(drawing, names)
    return drawing.to_text()


def positions(
    key: str, baseline: Sequence[float], candidate: Sequence[float], *, names: tuple[str, str]
) -> str:
    """Draw which share of the steps accepted at least so many tokens.

    Args:
        key: see `Drawing`.
        baseline: [K] shares in [0, 1].
        candidate: [K] shares in [0, 1].

    Returns:
        The element `svg`.
    """
    count = len(baseline)
    pairs = zip(baseline, candidate, strict=True)
    said = "; ".join(f"{i}: {b:.1%} and {q:.1%}" for i, (b, q) in enumerate(pairs, 1))
    title = "Share of steps that accepted the drafted token at each position"
    drawing = Drawing(key, _HEIGHT + _FEET, title=title, described=f"{_of(names)} {said}.")
    inner = 14.0 if count > 1 else (WIDTH - _LEFT - _RIGHT) / 2
    across = Scale(1, max(count, 2), _LEFT + inner, WIDTH - _RIGHT - 14)
    up = _share_axis(drawing, 1.0)
    for i in _thinned(count):
        drawing.text(across(i), _HEIGHT + 15, str(i), "soft", "middle")
    drawing.text(WIDTH - _RIGHT, _HEIGHT + 30, "position of the drafted token", "soft", "end")
    for shares, (look, mark, fill) in zip((baseline, candidate), _LOOKS, strict=True):
        places = [(across(i), up(share)) for i, share in enumerate(shares, 1)]
        drawing.curve(places, look)
        for x, y in places:
            drawing.mark(mark, x, y, f"{fill} {look}", 3.6)
    _legend(drawing, names)
    return drawing.to_text()


def histogram(
    key: str, baseline: Sequence[float], candidate: Sequence[float], *, names: tuple[str, str]
) -> str:
    """Draw which share of the steps accepted exactly so many tokens.

    Args:
        key: see `Drawing`.
        baseline: [K + 1] steps by number of accepted tokens, one at least.
        candidate: [K + 1] steps, one at least.

    Returns:
        The element `svg`.
    """
    both = [[steps / sum(counts) for steps in counts] for counts in (baseline, candidate)]
    said = "; ".join(
        f"{i}: {b:.1%} and {q:.1%}" for i, (b, q) in enumerate(zip(*both, strict=True))
    )
    title = "Share of steps by number of accepted draft tokens"
    drawing = Drawing(key, _HEIGHT + _FEET, title=title, described=f"{_of(names)} {said}.")
    up = _share_axis(drawing, max(map(max, both)))
    count = len(baseline)
    slot = (WIDTH - _LEFT - _RIGHT) / count
    wide = min(34.0, 0.38 * slot)
    labelled = _thinned(count)
    for i, shares in enumerate(zip(*both, strict=True)):
        middle = _LEFT + slot * (i + 0.5)
        for share, look, x in (
            (shares[0], "baseline", middle - wide - 0.02 * slot),
            (shares[1], "candidate", middle + 0.02 * slot),
        ):
            height = _HEIGHT - up(share)
            drawing.bar(x, up(share), wide, height, look, hatched=look == "candidate")
        if i + 1 in labelled:
            drawing.text(middle, _HEIGHT + 15, str(i), "soft", "middle")
    drawing.text(WIDTH - _RIGHT, _HEIGHT + 30, "accepted draft tokens in a step", "soft", "end")
    _legend(drawing, names)
    return drawing.to_text()


def scatter(key: str, dots: Sequence[Dot], *, limit: float, names: tuple[str, str]) -> str:
    """Draw prompts by their acceptance length under both drafts.

    Args:
        key: see `Drawing`.
        dots: at least one.
        limit: the relative drop that is allowed, in (0, 1).

    Returns:
        The element `svg`.
    """
    shown = dots[:: -(-len(dots) // _MOST_DOTS)]
    below = sum(dot.candidate < dot.baseline for dot in dots)
    above = sum(dot.candidate > dot.baseline for dot in dots)
    described = (
        f"{len(dots)} prompts: {below} accept less quantized, {above} more,"
        f" {len(dots) - below - above} the same."
    )
    if len(shown) < len(dots):
        described += f" {len(shown)} of them are drawn, evenly chosen."
    title = "Acceptance length of every prompt under both drafts"
    side = WIDTH - _LEFT - _RIGHT
    bottom = _TOP + side
    drawing = Drawing(key, bottom + _FEET, title=title, described=described)
    lengths = [length for dot in dots for length in (dot.baseline, dot.candidate)]
    margin = 0.06 * max(max(lengths) - min(lengths), 0.2)
    low, high = min(lengths) - margin, max(lengths) + margin
    across, up = Scale(low, high, _LEFT, _LEFT + side), Scale(low, high, bottom, _TOP)
    for value in ticks(low, high):
        drawing.line(across(value), _TOP, across(value), bottom, "grid")
        drawing.line(_LEFT, up(value), WIDTH - _RIGHT, up(value), "grid")
        drawing.text(across(value), bottom + 15, f"{value:g}", "soft", "middle")
        drawing.text(_LEFT - 6, up(value) + 4, f"{value:g}", "soft", "end")
    drawing.line(across(low), up(low), across(high), up(high), "same")
    kept = 1 - limit
    if high * kept > low:  # what lies below is no part of the chart
        drawing.line(across(low / kept), up(low), across(high), up(high * kept), "limit")
    for dot in shown:
        size = 2 + 4 * dot.weight**0.5
        drawing.mark("circle", across(dot.baseline), up(dot.candidate), "dot candidate", size)
    drawing.line(_LEFT, 12, _LEFT + 24, 12, "same")
    drawing.text(_LEFT + 30, 16, "equal")
    drawing.line(_LEFT + 76, 12, _LEFT + 100, 12, "limit")
    drawing.text(_LEFT + 106, 16, "limit of the whole")
    drawing.text(WIDTH - _RIGHT, bottom + 30, f"{names[0]}, acceptance length", "soft", "end")
    drawing.text(WIDTH - _RIGHT, 16, f"↑ {names[1]}", "soft", "end")
    return drawing.to_text()


def _share_axis(drawing: Drawing, highest: float) -> Scale:
    scale = Scale(0, max(highest, 0.01) * 1.04, _HEIGHT, _TOP)
    for value in ticks(0, scale.high):
        drawing.line(_LEFT, scale(value), WIDTH - _RIGHT, scale(value), "grid" if value else "axis")
        drawing.text(_LEFT - 6, scale(value) + 4, f"{100 * value:.3g}%", "soft", "end")
    return scale


def _legend(drawing: Drawing, names: tuple[str, str]) -> None:
    at = _LEFT
    for name, (look, mark, fill) in zip(names, _LOOKS, strict=True):
        drawing.curve([(at, 12), (at + 24, 12)], look)
        drawing.mark(mark, at + 12, 12, f"{fill} {look}", 3.6)
        drawing.text(at + 31, 16, name)
        at += 31 + drawing.text_width(name) + 18


def _thinned(count: int, most: int = 17) -> set[int]:
    """Of 1 .. count, those that have room for their numbers."""
    return set(range(1, count + 1, -(-count // most)))


def _of(names: tuple[str, str]) -> str:
    return f"{names[0]} and {names[1]} by number:"
