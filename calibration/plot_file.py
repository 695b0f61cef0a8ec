"""Files with drawings: matplotlib without a display, and equal figures in equal files."""

from pathlib import Path
from typing import Any

from ..recipes.install_line import install_line
from .errors import CalibrationError

FORMATS = (".svg", ".png", ".pdf")


def check_plot_path(path: Path) -> None:
    """Check that a drawing can be made before anything is measured.

    Raises:
        CalibrationError: the name's ending is no format, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise CalibrationError(
            path, f"expected a name ending in {', '.join(FORMATS)}", fix="for example plot.svg"
        )
    headless_pyplot()


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure and close it; the ending of the name says the format."""
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=metadata)
    headless_pyplot().close(figure)


def headless_pyplot() -> Any:
    """matplotlib.pyplot, which draws to files only.

    Raises:
        CalibrationError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as exc:
        raise CalibrationError(
            "matplotlib",
            "matplotlib draws the plot, and is not installed",
            fix=install_line("plot"),
        ) from exc
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "draftquant"  # the same names in every file
    from matplotlib import pyplot

    return pyplot
