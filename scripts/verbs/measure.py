"""`measure`: what a running server accepts on prompts, and how long it takes."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...recipes.decode import ABOVE_0, AT_LEAST_0, AT_LEAST_1
from ...validate.runs.judging_asked import MeasureRun
from ..frame import reports
from ..frame.arguments import (
    CHOSEN_PROMPTS,
    GoldenFile,
    Overwrite,
    SamplingSeed,
    Temperature,
    TopK,
    TopP,
)
from ..frame.console import print_table, stdout, table
from ..frame.settings import Option, Settings
from ..frame.verb import Command, verb

if TYPE_CHECKING:
    from ...validate.measure.measurement import Figures, Measurement


@dataclass(frozen=True)
class MeasureSettings(Settings, MeasureRun):
    """Which server is asked what, or which measurement is shown."""

    options: ClassVar = {
        **CHOSEN_PROMPTS,
        "server": Option(
            "address of the running server, http://HOST:PORT; an API key is read from"
            " DRAFTQUANT_SERVER_KEY",
            "URL",
        ),
        "engine": Option("engine that runs on the server"),
        "prompts": Option(
            "prompts, in the forms that 'record' takes; only the first turn of a "
            "conversation is measured",
            "PROMPTS",
        ),
        "out": Option("file to create (JSON lines)", "FILE"),
        "show": Option(
            "print the figures of an earlier measurement, and measure nothing", "MEASUREMENT"
        ),
        "tokenizer": Option(
            "folder of the target's tokenizer, for prompts given as text or messages", "FOLDER"
        ),
        "draft": Option(
            "the draft that the server runs; its identity is stored with the figures", "DRAFT"
        ),
        "served_as": Option(
            "with --draft: the server's own path or id of that draft, if it is another one",
            "NAME",
        ),
        "model": Option("name of the served target; a server with another one is refused", "NAME"),
        "max_new_tokens": Option(
            "longest answer in tokens (default 128)", "TOKENS", bounds=AT_LEAST_1
        ),
        "ignore_eos": Option(
            "ignore the end-of-text token: every answer has --max-new-tokens tokens"
        ),
        "temperature": Temperature,
        "top_p": TopP,
        "top_k": TopK,
        "seed": SamplingSeed,
        "top_logprobs": Option(
            "keep the log-probabilities of this many most likely tokens; 2 or more "
            "give the gap between the first two (default 0)",
            "TOKENS",
            bounds=AT_LEAST_0,
        ),
        "concurrency": Option("concurrent requests (default 8)", "REQUESTS", bounds=AT_LEAST_1),
        "warm_up": Option(
            "warm-up requests, which are not recorded (default 0)", "REQUESTS", bounds=AT_LEAST_0
        ),
        "max_requests_per_second": Option(
            "send at most this many requests per second (default: no limit)", "RATE", bounds=ABOVE_0
        ),
        "timeout": Option(
            "timeout of a request in seconds (default 600)", "SECONDS", bounds=ABOVE_0
        ),
        "attempts": Option(
            "attempts per request if the server is overloaded or drops the connection (default 6)",
            "ATTEMPTS",
            bounds=AT_LEAST_1,
        ),
        "golden": GoldenFile,
        "overwrite": Overwrite,
    }


@verb(MeasureSettings)
def measure(settings: MeasureSettings) -> "reports.Measurement":
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


COMMAND = Command(measure, _show, _mapping)
