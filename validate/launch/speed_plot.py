"""A drawing of how fast servers write, by the number of requests in flight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...calibration.plot_file import headless_pyplot, save_figure
from .crossed_intervals import Estimate
from .speed import SpeedFigures, SpeedReport

_PANEL = (5.5, 4.5)
"""Inches."""
_BESIDE = 0.06
"""Between the variants of a concurrency, as a share of it: intervals shall not cover each other."""


_ROOM = 1.5
"""Beyond the extreme figures: wider intervals say little, and would leave others no room."""


def draw_speed(report: SpeedReport, path: Path) -> None:
    """Draw tokens per second of every variant, and the speed-up where there is one without a draft.

    Args:
        report: of a matrix.
        path: file to write; its ending says the format, see `check_plot_path`.
    """
    pyplot = headless_pyplot()
    panels: list[tuple[str, Quantity]] = [("output tokens/s", _tokens_per_second)]
    if report.undrafted is not None and len(report.variants) > 1:
        panels.append((f"speed-up over {report.undrafted}", _speed_up))
    width, height = _PANEL
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(width * len(panels), height), squeeze=False
    )
    for (label, quantity), panel in zip(panels, axes[0], strict=True):
        _draw(panel, report, label, quantity)
    axes[0][0].set_yscale("log")
    axes[0][0].legend(fontsize=8)
    repeats = report.figures[0].repeats
    figure.suptitle(
        f"{report.engine}, {report.num_prompts} prompts, {repeats} repeat(s), 95 % intervals"
    )
    figure.tight_layout()
    save_figure(figure, path)


Quantity = Callable[[SpeedFigures], Estimate | None]


def _tokens_per_second(figures: SpeedFigures) -> Estimate | None:
    return figures.tokens_per_second


def _speed_up(figures: SpeedFigures) -> Estimate | None:
    return figures.speed_up


def _draw(panel: Any, report: SpeedReport, label: str, quantity: Quantity) -> None:
    for number, variant in enumerate(report.variants):
        found = [(c, quantity(report.of(variant, c))) for c in report.concurrencies]
        points = [(c * (1 + _BESIDE * number), e) for c, e in found if e is not None]
        if not points:
            continue
        values = [e.value for _, e in points]
        ends = [(e.lower or e.value, e.upper or e.value) for _, e in points]
        panel.errorbar(
            [x for x, _ in points],
            values,
            yerr=[
                [value - lower for value, (lower, _) in zip(values, ends, strict=True)],
                [upper - value for value, (_, upper) in zip(values, ends, strict=True)],
            ],
            marker="o",
            markersize=4,
            capsize=3,
            color=f"C{number}",
            label=variant,
        )
    figures = [e.value for one in report.figures if (e := quantity(one)) is not None]
    lowest, highest = min(figures), max(figures)
    if quantity is _speed_up:
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_ylim(0, _ROOM * max(highest, 1))
    else:
        panel.set_ylim(lowest / _ROOM, highest * _ROOM)
    panel.set_xscale("log", base=2)
    panel.set_xticks(report.concurrencies, [str(c) for c in report.concurrencies])
    panel.set_xlabel("requests in flight")
    panel.set_ylabel(label)
