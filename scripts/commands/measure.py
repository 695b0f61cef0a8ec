"""`draftquant measure`: what a running server accepts on prompts, and how long it takes."""

import argparse
import dataclasses
import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.staging import check_output
from ...validate.errors import MeasureError
from ...validate.measure.measurement import EngineName
from ..console import Bar, note, print_json, print_table, progress_bar, stdout, table
from .common import add_sampling, draft_identity
from .measure_launch import add_launch_arguments, run_launch

if TYPE_CHECKING:
    from ...validate.measure.measure_plan import Plan, ServerAddress
    from ...validate.measure.measurement import Measurement
    from ...validate.measure.measuring import Progress
    from ...validate.measure.summary import Figures

NEEDED = ("server", "engine", "prompts", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`measure --server URL --engine E --prompts P --out R`, `--launch M --out R`, `--show R`."""
    add_launch_arguments(parser)
    parser.add_argument(
        "--server",
        metavar="URL",
        help="http://HOST:PORT; its key, if it asks for one, is read from DRAFTQUANT_SERVER_KEY",
    )
    parser.add_argument("--engine", choices=typing.get_args(EngineName), help="that runs there")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="PROMPTS",
        help="as of 'record'; of conversations the first turn",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to create, JSON lines")
    parser.add_argument(
        "--show", type=Path, metavar="MEASUREMENT", help="only print the figures of a measurement"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="of the target, for prompts that are text or messages",
    )
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="the draft that the server runs: its identity is recorded with the figures",
    )
    parser.add_argument(
        "--served-as",
        metavar="NAME",
        help="with --draft: what the server calls this draft, where its own path or id is another"
        " name of the same one",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="refuse a server that serves its target by another name"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="TOKENS", help="default 128"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue each prompt to --max-new-tokens"
    )
    add_sampling(parser)
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="TOKENS",
        help="keep log-probabilities, and with N > 1 the gap of the two most likely tokens",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=8,
        metavar="REQUESTS",
        help="requests in flight (default 8)",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="requests before, which are not recorded (default 0)",
    )
    parser.add_argument(
        "--max-requests-per-second", type=float, metavar="RATE", help="begin no more than that"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="of a request (default 600)"
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=6,
        metavar="ATTEMPTS",
        help="per request, where the server is overloaded or breaks off (default 6)",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    if options.show is not None:
        from ...validate.measure.measurement_file import read_measurement

        _print(read_measurement(options.show), options.json)
        return 0
    if options.launch is not None:
        return run_launch(options)
    if options.plot is not None:
        raise MeasureError("--plot", "draws what --launch measures", fix="add --launch MATRIX")
    if options.served_as is not None and not options.draft:
        raise MeasureError("--served-as", "is another name of --draft", fix="add --draft DRAFT")
    missing = [name for name in NEEDED if getattr(options, name) is None]
    if missing:
        raise MeasureError(f"--{missing[0]}", "is needed to measure a server",
                           fix="give it, or --show MEASUREMENT to look at one")  # fmt: skip
    _print(_measured(options), options.json)
    return 0


def _measured(options: argparse.Namespace) -> "Measurement":
    from ...validate.measure.measuring import measure
    from ...validate.measure.protocols import get_protocol

    check_output(options.out)
    server, plan = _server(options), _plan(options)
    with progress_bar("measure", len(plan.prompts)) as bar:
        return measure(
            options.out,
            server,
            get_protocol(options.engine),
            plan,
            on_progress=_Teller(bar, options.concurrency),
        )


def _server(options: argparse.Namespace) -> "ServerAddress":
    from ...calibration.server_client import KEY_VARIABLE, Patience
    from ...validate.measure.measure_plan import ServerAddress

    return ServerAddress(
        url=options.server,
        key=os.environ.get(KEY_VARIABLE) or None,
        patience=Patience(attempts=options.attempts, seconds=options.timeout),
        most_per_second=options.max_requests_per_second,
    )


def _plan(options: argparse.Namespace) -> "Plan":
    from ...calibration.prompts.prompt_file import PromptEncoder, read_prompts
    from ...calibration.recording.decoding import Decoding
    from ...validate.measure.measure_plan import Plan
    from ...validate.measure.protocols.protocol import Ask

    decoding = Decoding(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        num_top_logprobs=options.top_logprobs,
    )
    encoder = PromptEncoder(options.tokenizer)
    prompts = read_prompts(options.prompts, encoder=encoder)
    if longer := sum(bool(prompt.later_turns) for prompt in prompts):
        note(
            f"{options.prompts}: {longer} of {len(prompts)} prompts have later turns of the user,"
            " which follow the target's answer: the first turn is measured"
        )
    return Plan(
        prompts=prompts,
        ask=Ask(
            decoding=decoding,
            max_new_tokens=options.max_new_tokens,
            ignore_eos=options.ignore_eos,
        ),
        concurrency=options.concurrency,
        num_warm_up=options.warm_up,
        template_sha256=encoder.template_sha256,
        draft=draft_identity(options.draft, options.served_as) if options.draft else None,
        model=options.model,
    )


class _Teller:
    """Moves the bar, and says once what a user has to know."""

    def __init__(self, bar: Bar, concurrency: int) -> None:
        self._bar = bar
        self._concurrency = concurrency
        self._has_begun = False

    def __call__(self, progress: "Progress") -> None:
        if not self._has_begun:
            self._has_begun = True
            self._say(progress)
        if progress.counts is not None and progress.counts.num_steps:
            self._bar.label(f"measure {progress.counts.mean_acceptance_length:.3f}")
        self._bar.set(progress.num_done, progress.num_prompts)

    def _say(self, progress: "Progress") -> None:
        setup = progress.setup
        if progress.num_done:
            cut = ", whose last line was cut off and is asked for again"
            note(
                f"goes on with {progress.num_done} of {progress.num_prompts} requests that are kept"
                + (cut if progress.dropped_line else "")
            )
        if setup.asked.concurrency < self._concurrency:
            note(
                f"{setup.asked.concurrency} request(s) in flight, not {self._concurrency}: only the"
                " server's counters tell what is accepted"
            )


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
        out.line("drafts nothing")
    else:
        quantization = speculation.draft_quantization
        out.line(
            f"K = {speculation.num_draft_tokens}, draft {speculation.draft or 'not known'}"
            + (f", quantization {quantization}" if quantization else "")
            + (f"; the server calls it {served}" if (served := speculation.served_draft) else "")
        )
        for lossy in speculation.lossy:
            out.line(("warning:", "yellow"), f" accepts what its target does not write: {lossy}")
        if not speculation.acceptance_told:
            out.line(
                ("warning:", "yellow"),
                " the server does not tell whether it accepts only what its target writes (vLLM:"
                " VLLM_SERVER_DEV_MODE=1 in its environment)",
            )
    _print_figures(figures)
    if speed is not None:
        out.line(f"{speed:,.1f} tokens/s")
    if repeated := figures[-1].num_repeated:
        out.line(("warning:", "yellow"), f" {repeated} requests were answered at a later attempt")


def _print_figures(figures: "tuple[Figures, ...]") -> None:
    numbers = ("requests", "tokens", "rounds", "acceptance length", "TTFT, ms", "TPOT, ms")
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
