"""A drawing of ranges: what every linear reads, step by step, beside what FP8 can say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plot_file import headless_pyplot, save_figure
from .chain_ranges import Half, RangeKey, Ranges
from .input_range import FP8_MAX, FP8_NORMAL

_SHARES = (0.5, 0.99, 0.9999, 1.0)
_LABELS = ("median", "99 %", "99.99 %", "largest")
_COLUMNS = 3
_LOOKS: dict[Half, tuple[str, str, float]] = {
    "whole": ("o", "tab:blue", 0.0),
    "embedding": ("o", "tab:green", -0.05),
    "hidden": ("s", "tab:orange", 0.05),
}
"""Marker, colour and shift along the steps."""


def draw_ranges(ranges: Ranges, path: Path, title: str) -> None:
    """Draw one panel per linear: magnitudes by step, the halves of a concat input apart.

    Args:
        ranges: at least one.
        path: file to write; its ending says the format.
        title: above all panels.

    Raises:
        CalibrationError: see `check_plot_path`.
    """
    pyplot = headless_pyplot()
    modules = sorted({key.module for key in ranges})
    rows = -(-len(modules) // _COLUMNS)
    figure, panels = pyplot.subplots(
        rows,
        min(_COLUMNS, len(modules)),
        figsize=(4.2 * min(_COLUMNS, len(modules)), 2.8 * rows + 0.6),
        squeeze=False,
        sharey=True,
    )
    for panel in panels.flat[len(modules) :]:
        panel.set_visible(False)
    for module, panel in zip(modules, panels.flat, strict=False):
        _draw_module(panel, module, ranges)
    drawn = [panel.get_legend_handles_labels() for panel in panels.flat]
    legend = {label: line for both in drawn for line, label in zip(both[0], both[1], strict=True)}
    figure.legend(legend.values(), legend, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    save_figure(figure, path)


def _draw_module(panel: Any, module: str, ranges: Ranges) -> None:
    keys = sorted(key for key in ranges if key.module == module)
    for half in sorted({key.half for key in keys}):
        marker, colour, shift = _LOOKS[half]
        own = [key for key in keys if key.half == half]
        for share, label, alpha in zip(_SHARES, _LABELS, (0.35, 0.55, 0.75, 1.0), strict=True):
            panel.plot(
                [key.step + shift for key in own],
                _magnitudes(ranges, own, share),
                marker=marker,
                color=colour,
                alpha=alpha,
                label=label if half == "whole" else f"{half}: {label}",
            )
    for level in (FP8_MAX, FP8_NORMAL):
        panel.axhline(
            level, color="tab:red", linestyle=":", linewidth=1, label="normal FP8 under scale 1.0"
        )
    panel.set_yscale("log")
    panel.set_title(module, fontsize=8)
    panel.set_xticks(sorted({key.step for key in keys}))
    panel.set_xlabel("draft step")


def _magnitudes(ranges: Ranges, keys: Sequence[RangeKey], share: float) -> list[float]:
    """A logarithmic axis has no zero."""
    return [max(ranges[key].percentile(share), 2.0**-20) for key in keys]
