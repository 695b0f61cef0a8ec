"""`draftquant measure --launch`: a matrix of servers, started, measured and compared by speed."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...validate.errors import MeasureError
from ..console import note, print_json, print_table, progress_bar, stdout, table
from .common import draft_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...calibration.prompts.prompt_file import Prompt
    from ...validate.launch.crossed_intervals import Estimate
    from ...validate.launch.launch import Cell, Folder
    from ...validate.launch.matrix import Matrix, Variant
    from ...validate.launch.speed import Run, SpeedFigures, SpeedReport
    from ...validate.measure.measure_plan import Plan, ServerAddress
    from ...validate.measure.measuring import Progress

OF_ONE_SERVER = ("server", "engine", "prompts")
"""Options that a matrix says itself."""
ONE_AT_A_TIME = {"vllm": "add --per-request-spec-decode-metrics summary to the variant's arguments"}


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """`measure --launch MATRIX.yaml --out DIR`."""
    parser.add_argument(
        "--launch",
        type=Path,
        metavar="MATRIX.yaml",
        help="instead of asking a server that runs: start those of this .yaml file one after the"
        " other, measure each at every concurrency into the folder --out, and compare their speed",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --launch: draw speeds (.svg, .png, .pdf)"
    )


def run_launch(options: argparse.Namespace) -> int:
    """See `add_launch_arguments`; of other options `--out`, `--json`, `--timeout`, `--attempts`."""
    from ...calibration.plot_file import check_plot_path
    from ...quantize.files.staging import check_output
    from ...validate.launch.launch import Folder, launch_matrix
    from ...validate.launch.matrix import load_matrix
    from ...validate.launch.speed import speed_report
    from ...validate.launch.speed_plot import draw_speed

    if options.out is None:
        raise MeasureError("--out", "is needed with --launch", fix="give a folder to create")
    for name in OF_ONE_SERVER:
        if getattr(options, name) is not None:
            raise MeasureError(f"--{name}", "is said by the matrix", fix="leave it out")
    if options.plot:
        check_output(options.plot)
        check_plot_path(options.plot)
    matrix, folder = load_matrix(options.launch), Folder(path=options.out)
    cell_measurer = CellMeasurer(options, matrix)
    launch_matrix(
        matrix,
        folder,
        plan=cell_measurer.identity(),
        ready=cell_measurer.first_answer,
        measure=cell_measurer.measure,
        on_progress=note,
    )
    report = speed_report(_runs(matrix, folder))
    if options.plot:
        draw_speed(report, options.plot)
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        print_speed(report)
    return 0


class CellMeasurer:
    """Measures the servers of a matrix by `run.measure`."""

    def __init__(self, options: argparse.Namespace, matrix: "Matrix") -> None:
        from ...calibration.prompts.prompt_file import PromptEncoder, read_prompts
        from ...calibration.traces.prompt_trace import prompt_sha256
        from ...validate.measure.measurement_checks import prompts_sha256

        target = Path(matrix.target)
        self._encoder = PromptEncoder(target if target.is_dir() else None)
        self._prompts: Sequence[Prompt] = read_prompts(Path(matrix.prompts), encoder=self._encoder)
        self._options, self._matrix = options, matrix
        self._drafts = {
            one.name: draft_identity(one.draft, one.served_as)
            for one in matrix.variants
            if one.draft
        }
        self._prompts_sha256 = prompts_sha256(
            (prompt.id, prompt.category, prompt_sha256(prompt.token_ids))
            for prompt in self._prompts
        )

    def identity(self) -> "dict[str, object]":
        """What a folder's measurements belong to beside the matrix: what its names stand for."""
        drafts = {name: draft.draft_sha256 for name, draft in self._drafts.items()}
        return {"prompts_sha256": self._prompts_sha256, "drafts_sha256": drafts}

    async def first_answer(self, variant: "Variant") -> None:
        """Get the server's first answer, and see that it can be measured at all."""
        from ...calibration.server_client import ServerClient
        from ...validate.measure.protocols import get_protocol

        server, plan = self._server(), self._plan(1, variant)
        protocol = get_protocol(self._matrix.engine)
        async with ServerClient(
            server.url, key=server.key, most_in_flight=1, patience=server.patience
        ) as client:
            setup = plan.setup(protocol, *await protocol.identify(client))
            if setup.speculation is not None and variant.draft is None:
                raise MeasureError(variant.name, "has no draft, and its server drafts",
                                   fix="correct the variant's arguments")  # fmt: skip
            most = protocol.most_in_flight
            if most is not None and most < max(self._matrix.concurrencies):
                raise MeasureError(
                    variant.name,
                    f"only {most} request(s) at a time can be told apart",
                    fix=ONE_AT_A_TIME.get(self._matrix.engine, "see 'concurrencies:'"),
                )
            await protocol.complete(client, plan.prompts[0], plan.ask)

    def measure(self, cell: "Cell", out: Path) -> None:
        """Measure one cell."""
        from ...validate.measure.measuring import measure
        from ...validate.measure.protocols import get_protocol

        plan = self._plan(cell.concurrency, cell.variant)
        with progress_bar(cell.name, len(self._prompts)) as bar:

            def tell(progress: "Progress") -> None:
                bar.set(progress.num_done, progress.num_prompts)

            measure(out, self._server(), get_protocol(self._matrix.engine), plan, on_progress=tell)

    def _server(self) -> "ServerAddress":
        from ...calibration.server_client import KEY_VARIABLE, Patience
        from ...validate.measure.measure_plan import ServerAddress

        return ServerAddress(
            url=self._matrix.url,
            key=os.environ.get(KEY_VARIABLE) or None,
            patience=Patience(attempts=self._options.attempts, seconds=self._options.timeout),
        )

    def _plan(self, concurrency: int, variant: "Variant") -> "Plan":
        from ...validate.measure.measure_plan import Plan
        from ...validate.measure.protocols.protocol import Ask

        return Plan(
            prompts=self._prompts,
            ask=Ask(
                decoding=self._matrix.decoding,
                max_new_tokens=self._matrix.max_new_tokens,
                ignore_eos=self._matrix.ignore_eos,
            ),
            concurrency=concurrency,
            num_warm_up=self._matrix.num_warm_up,
            template_sha256=self._encoder.template_sha256,
            draft=self._drafts.get(variant.name),
        )


def _runs(matrix: "Matrix", folder: "Folder") -> "list[Run]":
    from ...validate.launch.launch import cells
    from ...validate.launch.speed import Run
    from ...validate.measure.measurement_file import read_measurement

    return [
        Run(
            variant=cell.variant.name,
            drafts=cell.variant.draft is not None,
            concurrency=cell.concurrency,
            repeat=cell.repeat,
            measurement=read_measurement(folder.measurement(cell)),
        )
        for cell in cells(matrix)
    ]


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
        "TPOT: time behind the first tokens over tokens, pooled; tokens/s: while all are in flight;"
        " of whole runs: over wall time, with the end where fewer are"
    )
    if report.undrafted is not None:
        name = report.undrafted
        out.line(f"speed-up: tokens/s over those of {name}, paired by prompt and repeat")
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
