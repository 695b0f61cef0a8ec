"""SVG by matplotlib that follows the reader's light or dark mode, and is equal for equal figures.

matplotlib writes each colour as its light value; the file then names them as variables, which a
media query sets. A picture has its own background, so that it stays readable on any page.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("agg")
matplotlib.rcParams["svg.hashsalt"] = "draftquant"  # the same names in every file

INK, FAINT, GRID, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
BLUE, ORANGE, RED, GREEN, PURPLE = "#0072b2", "#b35f00", "#c0303a", "#00735c", "#8a3ea0"
DARK: Mapping[str, str] = {
    INK: "#e6edf3",
    FAINT: "#9198a1",
    GRID: "#3d444d",
    PAPER: "#0d1117",
    BLUE: "#58a6d9",
    ORANGE: "#e69f00",
    RED: "#ff7b72",
    GREEN: "#2fc4a2",
    PURPLE: "#cc8ad9",
}
"""Light colour -> dark colour. Colour-blind readers can distinguish the light ones too (Okabe and
Ito's, darkened for text), and no meaning depends on colour alone."""
_SETTINGS: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's own sans-serif
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@contextmanager
def house_look() -> Iterator[None]:
    """Figures drawn inside the block have our colours and fonts."""
    settings: Any = _SETTINGS  # each version of matplotlib types its own keys
    with pyplot.rc_context(settings):
        yield


def figure(
    width: float, height: float, columns: int = 1, **settings: Any
) -> tuple[Any, Sequence[Any]]:
    """A figure in inches and its axes side by side; `settings` go to `subplots`."""
    made, axes = pyplot.subplots(1, columns, figsize=(width, height), squeeze=False, **settings)
    return made, list(axes[0])


def svg(made: Any, title: str) -> str:
    """The figure as text of an SVG file, whose title screen readers speak; closes the figure."""
    file = io.StringIO()
    made.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    pyplot.close(made)
    text = re.sub(r"font: ([0-9.]+)px [^;\"]*", rf"font: \1px {_FONTS}", file.getvalue())
    text = re.sub(r"font: bold ([0-9.]+)px [^;\"]*", rf"font: bold \1px {_FONTS}", text)
    for light in DARK:
        text = text.replace(light, f"var(--{_name(light)})")
    head, opening, rest = text.partition("<defs>")
    lines = (line.rstrip() for line in f"{head}{_style()}{opening}{rest}".splitlines())
    return "\n".join(lines) + "\n"


def _style() -> str:
    light = " ".join(f"--{_name(each)}: {each};" for each in DARK)
    dark = " ".join(f"--{_name(each)}: {other};" for each, other in DARK.items())
    return (
        f"<style>\n:root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n</style>\n "
    )


def _name(light: str) -> str:
    """The variable of a colour; by number, for a colour would be found in its own name."""
    return f"c{list(DARK).index(light)}"
