"""`measure`: what a running server accepts on prompts, and how long it takes."""

import argparse
import dataclasses
import os
import typing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...quantize.files.hub import Reference, resolve_draft
from ...quantize.files.staging import check_output
from ...recipes.decode import ABOVE_0, AT_LEAST_0, AT_LEAST_1
from ...recipes.errors import MeasureError
from ...recipes.listener import Bar, Listener, beyond_kept
from ...recipes.regular_file import AnyPath, optional_path
from ...validate.measure.measurement import EngineName
from ..frame import reports
from ..frame.arguments import (
    ChosenPrompts,
    GoldenFile,
    Overwrite,
    SamplingSeed,
    Temperature,
    TopK,
    TopP,
)
from ..frame.console import print_json, print_table, stdout, table
from ..frame.pages import check_golden, write_golden
from ..frame.settings import Option
from ..frame.verb import verb

if TYPE_CHECKING:
    from ...validate.measure.measurement import Figures, Measurement
    from ...validate.measure.measuring import DraftIdentity, Plan, Progress, ServerAddress

_NEEDED = {
    "server": "--server http://HOST:PORT",
    "engine": f"--engine {' or '.join(typing.get_args(EngineName))}, as the server runs",
    "prompts": "--prompts FILE",
    "out": "--out FILE",
}


def draft_identity(reference: Reference, served_as: str | None = None) -> "DraftIdentity":
    """A draft's identity, as the gate knows it, and what its server calls it."""
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.measure.measuring import DraftIdentity

    folder = DraftFolder.read(resolve_draft(str(reference)).folder)
    quantization = "of another tool" if folder.quantized else "none"
    if folder.quantized_by is not None:
        quantization = folder.quantized_by.recipe.name
    given = Path(reference)
    return DraftIdentity(
        draft=given.resolve().name if given.is_dir() else str(reference),
        draft_sha256=folder.sha256,
        draft_quantization=quantization,
        quantized=folder.quantized,
        folder=folder.folder,
        served_as=served_as,
    )


@dataclass(frozen=True, slots=True)
class MeasureSettings(ChosenPrompts):
    """Which server is asked what, or which measurement is shown."""

    _: KW_ONLY
    server: Annotated[
        str | None,
        Option(
            "address of the running server, http://HOST:PORT; an API key is read from"
            " DRAFTQUANT_SERVER_KEY",
            "URL",
        ),
    ] = None
    engine: Annotated[EngineName | None, Option("engine that runs on the server")] = None
    prompts: Annotated[
        AnyPath | None,
        Option(
            "prompts, in the forms that 'record' takes; only the first turn of a "
            "conversation is measured",
            "PROMPTS",
        ),
    ] = None
    out: Annotated[AnyPath | None, Option("file to create (JSON lines)", "FILE")] = None
    show: Annotated[
        AnyPath | None,
        Option("print the figures of an earlier measurement, and measure nothing", "MEASUREMENT"),
    ] = None
    tokenizer: Annotated[
        AnyPath | None,
        Option("folder of the target's tokenizer, for prompts given as text or messages", "FOLDER"),
    ] = None
    draft: Annotated[
        Reference | None,
        Option("the draft that the server runs; its identity is stored with the figures", "DRAFT"),
    ] = None
    served_as: Annotated[
        str | None,
        Option(
            "with --draft: the server's own path or id of that draft, if it is another one",
            "NAME",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option("name of the served target; a server with another one is refused", "NAME"),
    ] = None
    max_new_tokens: Annotated[
        int, Option("longest answer in tokens (default 128)", "TOKENS", bounds=AT_LEAST_1)
    ] = 128
    ignore_eos: Annotated[
        bool, Option("ignore the end-of-text token: every answer has --max-new-tokens tokens")
    ] = False
    temperature: Temperature = 0
    top_p: TopP = 1
    top_k: TopK = 0
    seed: SamplingSeed = 0
    top_logprobs: Annotated[
        int,
        Option(
            "keep the log-probabilities of this many most likely tokens; 2 or more "
            "give the gap between the first two (default 0)",
            "TOKENS",
            bounds=AT_LEAST_0,
        ),
    ] = 0
    concurrency: Annotated[
        int, Option("concurrent requests (default 8)", "REQUESTS", bounds=AT_LEAST_1)
    ] = 8
    warm_up: Annotated[
        int,
        Option(
            "warm-up requests, which are not recorded (default 0)", "REQUESTS", bounds=AT_LEAST_0
        ),
    ] = 0
    max_requests_per_second: Annotated[
        float | None,
        Option(
            "send at most this many requests per second (default: no limit)", "RATE", bounds=ABOVE_0
        ),
    ] = None
    timeout: Annotated[
        float, Option("timeout of a request in seconds (default 600)", "SECONDS", bounds=ABOVE_0)
    ] = 600
    attempts: Annotated[
        int,
        Option(
            "attempts per request if the server is overloaded or drops the connection (default 6)",
            "ATTEMPTS",
            bounds=AT_LEAST_1,
        ),
    ] = 6

    golden: GoldenFile = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """One of the two is asked for, and it has what it needs."""
        if self.show is not None:
            return
        if self.served_as is not None and not self.draft:
            raise MeasureError("--served-as", "is another name of --draft", fix="add --draft DRAFT")
        missing = [name for name in _NEEDED if getattr(self, name) is None]
        if missing:
            fix = f"give {_NEEDED[missing[0]]}; or --show MEASUREMENT to look at one"
            raise MeasureError(f"--{missing[0]}", "is needed to measure a server", fix=fix)


@verb(MeasureSettings)
def measure(settings: MeasureSettings) -> "reports.Measurement":
    """Measure how many drafted tokens a running server accepts on prompts, and how long it takes.

    Returns:
        What the server did with each prompt.

    Raises:
        DraftQuantError: the server cannot be measured. Answers that were measured before are kept,
            and the same call continues with them.
    """
    check_golden(settings.golden, overwrite=settings.overwrite)
    found = _shown(settings.show) if settings.show is not None else _one_server(settings)
    if settings.golden is not None:
        from ...validate.golden.golden_sources import golden_of_measurement

        golden = golden_of_measurement(found)
        write_golden(settings.golden, golden, overwrite=settings.overwrite)
    return found


def _shown(path: AnyPath) -> "reports.Measurement":
    from ...validate.measure.measurement_file import read_measurement

    return read_measurement(Path(path))


def _one_server(settings: MeasureSettings) -> "reports.Measurement":
    from ...validate.measure import measuring
    from ...validate.measure.engine_protocol import get_protocol

    out, engine, url = settings.out, settings.engine, settings.server
    assert out is not None  # see `check`, and for the others too
    assert engine is not None
    assert url is not None
    check_output(Path(out))
    server, plan = _address(settings, url), _plan(settings)
    with settings.listener.bar("measure", len(plan.prompts)) as bar:
        teller = _Teller(bar, settings.listener, settings.concurrency)
        return measuring.measure(Path(out), server, get_protocol(engine), plan, on_progress=teller)


def _address(settings: MeasureSettings, url: str) -> "ServerAddress":
    from ...calibration.server_client import KEY_VARIABLE, Patience
    from ...validate.measure.measuring import ServerAddress

    return ServerAddress(
        url=url,
        key=os.environ.get(KEY_VARIABLE) or None,
        patience=Patience(attempts=settings.attempts, seconds=settings.timeout),
        most_per_second=settings.max_requests_per_second,
    )


def _plan(settings: MeasureSettings) -> "Plan":
    from ...calibration.prompts.prompt_file import PromptEncoder
    from ...calibration.recording.decoding import Decoding
    from ...validate.measure.engine_protocol import Ask
    from ...validate.measure.measuring import Plan

    decoding = Decoding(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        num_top_logprobs=settings.top_logprobs,
    )
    encoder, path = PromptEncoder(optional_path(settings.tokenizer)), settings.prompts
    assert path is not None  # see `check`
    prompts = settings.read_prompts(path, encoder).prompts
    if longer := sum(bool(prompt.later_turns) for prompt in prompts):
        settings.listener.note(
            f"{path}: {longer} of {len(prompts)} prompts have later turns of the user,"
            " which follow the target's answer: the first turn is measured"
        )
    return Plan(
        prompts=prompts,
        ask=Ask(
            decoding=decoding,
            max_new_tokens=settings.max_new_tokens,
            ignore_eos=settings.ignore_eos,
        ),
        concurrency=settings.concurrency,
        num_warm_up=settings.warm_up,
        template_sha256=encoder.template_sha256,
        draft=draft_identity(settings.draft, settings.served_as) if settings.draft else None,
        model=settings.model,
    )


class _Teller:
    """Moves the bar, and says once what a user has to know."""

    def __init__(self, bar: Bar, listener: Listener, concurrency: int) -> None:
        self._bar, self._listener = bar, listener
        self._show, self._concurrency = beyond_kept(bar), concurrency
        self._has_begun = False

    def __call__(self, progress: "Progress") -> None:
        if not self._has_begun:
            self._has_begun = True
            self._say(progress)
        if progress.counts is not None and progress.counts.num_steps:
            self._bar.label(f"measure {progress.counts.mean_acceptance_length:.3f}")
        self._show(progress.num_done, progress.num_prompts)

    def _say(self, progress: "Progress") -> None:
        setup = progress.setup
        if progress.num_done:
            cut = ", whose last line was cut off and is asked for again"
            self._listener.note(
                f"goes on with {progress.num_done} of {progress.num_prompts} requests that are kept"
                + (cut if progress.dropped_line else "")
            )
        if setup.asked.concurrency < self._concurrency:
            self._listener.note(
                f"{setup.asked.concurrency} request(s) in flight, not {self._concurrency}: only the"
                " server's counters tell what is accepted"
            )


# ---- `draftquant measure`: what a running server accepts on prompts, and how long it takes

VERB = measure


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    _print(measure.run(options.settings), options.json)
    return 0


def _print(measurement: "Measurement", as_json: bool) -> None:
    from ...recipes.decode import encode
    from ...validate.measure.measurement import all_figures, tokens_per_second

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
