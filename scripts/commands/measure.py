"""`draftquant measure`: what a running server accepts on prompts, and how long it takes."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ..api.measure import measure
from ..console import print_json, print_table, stdout, table

if TYPE_CHECKING:
    from ...validate.measure.measurement import Measurement
    from ...validate.measure.summary import Figures

VERB = measure


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    _print(measure.run(options.settings), options.json)
    return 0


def _print(measurement: "Measurement", as_json: bool) -> None:
    from ...recipes.decode import encode
    from ...validate.measure.summary import all_figures, tokens_per_second

    figures, speed = all_figures(measurement), tokens_per_second(measurement)
    if as_json:
        own = [dataclasses.asdict(each) for each in figures]
        setup = encode(measurement.setup)
        print_json({"setup": setup, "figures": own, "tokens_per_second": speed})
        return
    out, setup = stdout(), measurement.setup
    server, speculation, asked = setup.server, setup.speculation, setup.asked
    out.line(
        (measurement.name, "bold"),
        f": {server.engine} {server.version}, {server.model}, {asked.concurrency} in flight,"
        f" {f'temperature {asked.temperature:g}' if asked.temperature else 'greedy'}",
    )
    if speculation is None:
        out.line("the server does not use a draft")
    else:
        quantization = speculation.draft_quantization
        out.line(
            f"K = {speculation.num_draft_tokens}, draft {speculation.draft or 'not known'}"
            + (f", quantization {quantization}" if quantization else "")
            + (f"; the server calls it {served}" if (served := speculation.served_draft) else "")
        )
    _print_figures(figures)
    if speed is not None:
        out.line(f"{speed:,.1f} tokens/s")
    for warning in measurement.warnings:
        out.line(("warning:", "yellow"), f" {warning}")


def _print_figures(figures: "tuple[Figures, ...]") -> None:
    numbers = ("requests", "tokens", "verify steps", "acceptance length", "TTFT, ms", "TPOT, ms")
    found = table("Measured", "category", *numbers, right=numbers)
    for own in figures:
        found.row(
            own.category,
            f"{own.num_requests:,}",
            f"{own.num_output_tokens:,}",
            "" if own.num_rounds is None else f"{own.num_rounds:,}",
            "" if own.acceptance_length is None else f"{own.acceptance_length:.4f}",
            _milliseconds(own.time_to_first_token),
            _milliseconds(own.time_per_output_token),
        )
    print_table(found)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"
