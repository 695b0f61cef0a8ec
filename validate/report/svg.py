"""Charts as SVG inside a page, drawn from numbers and words: elements, scales and style sheet.

Colours and fonts come from the page (`look.css`): a chart names what a mark is, not how it looks.
Shape or line style always repeats what colour shows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader

from ...recipes.errors import visible

WIDTH = 400
"""Width of every chart, in its own units: text stays readable on a phone of that width."""
_CHARACTER, _NARROW = 6.7, 6.2  # widths of one in wide and in usual fonts, in these units
Anchor = Literal["start", "middle", "end"]
Mark = Literal["circle", "square", "diamond", "triangle"]
MARKS: tuple[Mark, ...] = ("circle", "square", "diamond", "triangle")
_SHAPES: Mapping[Mark, tuple[float, Sequence[tuple[float, float]]]] = {
    "square": (0.9, ((-1, -1), (1, -1), (1, 1), (-1, 1))),
    "diamond": (1.4, ((0, -1), (1, 0), (0, 1), (-1, 0))),
    "triangle": (1.25, ((0, -1), (1, 0.8), (-1, 0.8))),
}

_FILES = PackageLoader(__package__, "")


class Drawing:
    """What a chart draws on; `key` tells it from the others of its page, `height` is as `WIDTH`."""

    def __init__(self, key: str, height: float, *, title: str, described: str) -> None:
        self.key = key
        self.height = height
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "class": "chart",
                "viewBox": f"0 0 {WIDTH} {_number(height)}",
                "role": "img",
                "aria-labelledby": f"{key}-title {key}-desc",
            },
        )
        self._add("title", {"id": f"{key}-title"}).text = visible(title)
        self._add("desc", {"id": f"{key}-desc"}).text = visible(described)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str) -> None:
        """A straight line."""
        self._drawn("line", look, x1=x1, y1=y1, x2=x2, y2=y2)

    def curve(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """Straight lines from point to point."""
        self._drawn("polyline", f"curve {look}", points=_points(points))

    def text(self, x: float, y: float, text: str, look: str = "", anchor: Anchor = "start") -> None:
        """One line of text with base line `y`."""
        self._drawn("text", look, x=x, y=y, text_anchor=anchor).text = visible(text)

    def label(self, x: float, y: float, text: str, room: float, look: str = "") -> None:
        """Text that ends at `x` and is cut where there is no room; hovering shows all of it."""
        most = max(2, int(room / _NARROW))
        shown = visible(text)
        element = self._drawn("text", look, x=x, y=y, text_anchor="end")
        element.text = shown
        if len(shown) > most:
            element.text = f"{shown[: most - 1]}…"
            ElementTree.SubElement(element, "title").text = shown
            ElementTree.indent(element, space="")

    def mark(self, kind: Mark, x: float, y: float, look: str, size: float = 4) -> None:
        """A mark centred there; `size` is about half its width."""
        if kind == "circle":
            self._drawn("circle", look, cx=x, cy=y, r=size)
            return
        reach, corners = _SHAPES[kind]
        reach *= size
        self.polygon([(x + reach * dx, y + reach * dy) for dx, dy in corners], look)

    def polygon(self, corners: Sequence[tuple[float, float]], look: str) -> None:
        """A filled shape."""
        self._drawn("polygon", look, points=_points(corners))

    def bar(
        self, x: float, y: float, width: float, height: float, look: str, *, hatched: bool = False
    ) -> None:
        """A rectangle, hatched or filled with the colour of `look`."""
        fill = "hollow" if hatched else "full"
        element = self._drawn("rect", f"{fill} {look}", x=x, y=y, width=width, height=height)
        if hatched:
            pattern = self._pattern(look)
            self._add("rect", {**element.attrib, "class": "", "fill": f"url(#{pattern})"})

    def text_width(self, text: str) -> float:
        """The approximate width of a text."""
        return _CHARACTER * len(visible(text))

    def to_text(self) -> str:
        """The element `svg`, for a page or for a file."""
        return ElementTree.tostring(self._root, encoding="unicode")

    def _pattern(self, look: str) -> str:
        name = f"{self.key}-{look}"
        if self._root.find(f"pattern[@id='{name}']") is None:
            size = {"width": "5", "height": "5", "patternUnits": "userSpaceOnUse"}
            turned = {"patternTransform": "rotate(45)", "class": look}
            pattern = ElementTree.Element("pattern", {"id": name, **size, **turned})
            ends = {"x1": "0", "y1": "0", "x2": "0", "y2": "5", "class": "hatch"}
            ElementTree.SubElement(pattern, "line", ends)
            self._root.insert(2, pattern)  # after title and description
        return name

    def _drawn(self, tag: str, look: str, **attributes: float | str) -> ElementTree.Element:
        plain = {
            name.replace("_", "-"): value if isinstance(value, str) else _number(value)
            for name, value in attributes.items()
        }
        return self._add(tag, {**plain, "class": look} if look else plain)

    def _add(self, tag: str, attributes: dict[str, str]) -> ElementTree.Element:
        return ElementTree.SubElement(self._root, tag, attributes)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Two digits after the point, so that equal drawings are equal files."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale: `low` lies at `start`, `high` at `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def clipped(self, value: float) -> float:
        """The place of a value, or the nearer end."""
        return self(min(max(value, self.low), self.high))

    def holds(self, value: float) -> bool:
        """Whether a value lies between the ends."""
        return self.low <= value <= self.high


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], at most `most` + 1."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def percent(share: float) -> str:
    """A change beside an axis, such as +0.5%, with a typographic minus."""
    if abs(share) < 1e-12:
        return "0%"
    return f"{100 * share:+.3g}%".replace("-", "−")  # noqa: RUF001


def style_sheet() -> str:
    """CSS: colours for light, dark and paper, and what the classes of charts look like."""
    source, _, _ = _FILES.get_source(Environment(autoescape=True), "look.css")
    return source


def standalone(svg: str) -> str:
    """A drawing of this package as a file, light or dark as the viewer's system is."""
    head, rest = svg.split(">", 1)
    style = f"<style>{style_sheet()}svg {{ background: var(--paper); }}</style>"
    return f'{head} width="800">{style}{rest}\n'
