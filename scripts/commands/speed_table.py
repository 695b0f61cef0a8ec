"""How `draftquant measure --launch` shows what it compares."""

from typing import TYPE_CHECKING

from ..console import print_table, stdout, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...validate.launch.crossed_intervals import Estimate
    from ...validate.launch.speed import SpeedFigures, SpeedReport


def print_speed(report: "SpeedReport") -> None:
    """Print what is compared, with intervals, and how requests spread."""
    repeats = report.figures[0].repeats
    _print_table(
        report,
        f"{report.engine}, {report.model}: {report.num_prompts} prompts, {repeats} repeat(s),"
        " 95 % intervals",
        {
            "TPOT, ms": lambda f: _estimate(f.time_per_output_token, 2, 1000),
            "tokens/s": lambda f: _estimate(f.tokens_per_second, 1),
            "speed-up": lambda f: _estimate(f.speed_up, 3),
            f"against {report.baseline}": lambda f: _estimate(f.against_baseline, 3),
            "acceptance length": lambda f: _estimate(f.acceptance_length, 3),
        },
    )
    _print_table(
        report,
        "Requests, ms",
        {
            "TPOT median": lambda f: _milliseconds(f.time_per_output_token_spread, "median"),
            "TPOT p99": lambda f: _milliseconds(f.time_per_output_token_spread, "p99"),
            "TTFT mean": lambda f: _milliseconds(f.time_to_first_token, "mean"),
            "TTFT median": lambda f: _milliseconds(f.time_to_first_token, "median"),
            "TTFT p99": lambda f: _milliseconds(f.time_to_first_token, "p99"),
            "tokens": lambda f: f"{f.num_tokens:,}",
            "tokens/s of whole runs": lambda f: f"{f.whole_run_tokens_per_second:,.1f}",
        },
    )
    out = stdout()
    out.line(
        "TPOT is the time after the first tokens divided by their number, pooled. Tokens/s counts"
        " while all requests are in flight; that of whole runs includes the end, where fewer are"
    )
    if report.undrafted is not None:
        name = report.undrafted
        out.line(f"speed-up is tokens/s relative to {name}, paired by prompt and repeat")
    for warning in report.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _print_table(
    report: "SpeedReport", heading: str, columns: "dict[str, Callable[[SpeedFigures], str]]"
) -> None:
    """A row for each server at each concurrency."""
    found = table(heading, "in flight", "server", *columns, right=("in flight", *columns))
    for concurrency in report.concurrencies:
        for variant in report.variants:
            figures = report.of(variant, concurrency)
            cells = [cell(figures) for cell in columns.values()]
            found.row(str(concurrency) if variant == report.variants[0] else "", variant, *cells)
        found.add_section()
    print_table(found)


def _estimate(found: "Estimate | None", digits: int, unit: float = 1) -> str:
    if found is None:
        return ""
    one = found.times(unit)
    if one.lower is None or one.upper is None:
        return f"{one.value:,.{digits}f}"
    return f"{one.value:,.{digits}f} ({one.lower:,.{digits}f}, {one.upper:,.{digits}f})"


def _milliseconds(spread: object, name: str) -> str:
    return "" if spread is None else f"{1000 * getattr(spread, name):,.1f}"
