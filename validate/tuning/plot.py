"""A drawing of the path: bytes of the draft against what it loses, and what is chosen."""

import math
from pathlib import Path

from ...calibration.plot_file import headless_pyplot, save_figure
from .mixture import described
from .tune import TuneReport


def draw_path(report: TuneReport, path: Path, title: str) -> None:
    """Draw every mixture with its bounds, and the unquantized draft.

    Args:
        report: with at least one point.
        path: file to write; its ending says the format, see `check_plot_path`.
        title: above the drawing.
    """
    pyplot = headless_pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 5))
    for point in report.points:
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
        )
        panel.annotate(
            described(point.mixture),
            (point.nbytes / 1e6, change),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=6,
        )
    panel.plot(report.unquantized_bytes / 1e6, 0, marker="s", color="black")
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xlabel("tensors of the draft, MB")
    panel.set_ylabel("change of the acceptance length, % (one-sided 95 % bounds)")
    panel.set_title(title)
    save_figure(figure, path)
