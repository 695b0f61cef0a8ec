"""What is said of a trace folder that a command wrote, to people and to machines."""

from typing import TYPE_CHECKING, Any

from ..console import stdout

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


def print_written(traces: "TraceFolder", of: str = "") -> None:
    """Print its name, how many traces and tokens it has, and its identity."""
    stdout().line(
        (str(traces.folder), "bold"),
        f": {len(traces)} traces{of}, {traces.manifest.num_tokens:,} tokens, sha256"
        f" {traces.sha256[:16]}",
    )


def written(traces: "TraceFolder") -> dict[str, Any]:
    """The same for JSON."""
    return {
        "out": str(traces.folder),
        "traces": len(traces),
        "tokens": traces.manifest.num_tokens,
        "sha256": traces.sha256,
    }
