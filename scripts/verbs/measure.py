"""`measure`: what a running server accepts on prompts, and how long it takes."""

import dataclasses
from typing import TYPE_CHECKING, Any

from ...validate.runs.serving_asked import MeasureRun
from ..frame import reports
from ..frame.console import print_table, stdout, table
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.measure.measurement import Figures, Measurement


@verb(MeasureRun)
def measure(settings: MeasureRun) -> "reports.Measurement":
    """Measure how many drafted tokens a running server accepts on prompts, and how long it takes.

    Returns:
        What the server did with each prompt.

    Raises:
        DraftQuantError: the server cannot be measured. Answers that were measured before are kept,
            and the same call continues with them.
    """
    from ...validate.runs.measure_run import measured

    return measured(settings)


def _mapping(measurement: "Measurement", _settings: object) -> dict[str, Any]:
    from ...recipes.decode import encode
    from ...validate.measure.measurement import all_figures, tokens_per_second

    return {
        "setup": encode(measurement.setup),
        "figures": [dataclasses.asdict(each) for each in all_figures(measurement)],
        "tokens_per_second": tokens_per_second(measurement),
    }


def _show(measurement: "Measurement", _settings: object) -> None:
    from ...validate.measure.measurement import all_figures, tokens_per_second

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
    _print_figures(all_figures(measurement))
    if (speed := tokens_per_second(measurement)) is not None:
        out.line(f"{speed:,.1f} tokens/s")
    out.warnings(measurement.warnings)


def _print_figures(figures: "tuple[Figures, ...]") -> None:
    rows = table("Measured", "category", "requests", "tokens", "verify steps",
                 "acceptance length", "TTFT, ms", "TPOT, ms")  # fmt: skip
    for measured in figures:
        rows.row(
            measured.category,
            f"{measured.num_requests:,}",
            f"{measured.num_output_tokens:,}",
            "" if measured.num_rounds is None else f"{measured.num_rounds:,}",
            "" if measured.acceptance_length is None else f"{measured.acceptance_length:.4f}",
            _milliseconds(measured.time_to_first_token),
            _milliseconds(measured.time_per_output_token),
        )
    print_table(rows)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"


COMMAND = Command(measure, _show, _mapping)
