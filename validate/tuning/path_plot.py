"""A drawing of the path: bytes of the draft against what it loses, and what is chosen."""

import math
from pathlib import Path

from ...calibration.plot_file import headless_pyplot, save_figure
from .draft_mixture import described
from .tune_draft import TuneReport

_PANEL, _LINE = 4.5, 0.22
"""Inches: height of the drawing, and of a line of the legend below it."""


def draw_path(report: TuneReport, path: Path, title: str) -> None:
    """Draw every mixture with its bounds, numbered, and the unquantized draft.

    Args:
        report: with at least one point.
        path: file to write; its ending says the format, see `check_plot_path`.
        title: above the drawing.
    """
    pyplot = headless_pyplot()
    height = _PANEL + _LINE * (2 + len(report.points))
    figure, panel = pyplot.subplots(figsize=(8, height))
    for number, point in enumerate(report.points, start=1):
        change, lower, upper = (
            100 * math.expm1(x)
            for x in (point.change.log_ratio, point.change.lower, point.change.upper)
        )
        chosen = point is report.chosen
        panel.errorbar(
            point.nbytes / 1e6,
            change,
            yerr=[[change - lower], [upper - change]],
            marker="D" if chosen else "o",
            markersize=9 if chosen else 5,
            color="tab:orange" if chosen else "tab:blue" if point.best else "tab:gray",
            capsize=3,
            label=f"{number}  {described(point.mixture)}{'  (chosen)' if chosen else ''}",
        )
        panel.annotate(
            str(number), (point.nbytes / 1e6, change), xytext=(7, 5), textcoords="offset points"
        )
    panel.plot(report.unquantized_bytes / 1e6, 0, "s", color="black", label="the unquantized draft")
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xlabel("tensors of the draft, MB")
    panel.set_ylabel("change of the acceptance length, %\n(one-sided 95 % bounds)")
    panel.set_title(title)
    figure.legend(loc="lower left", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 1 - _PANEL / height, 1, 1))
    save_figure(figure, path)
