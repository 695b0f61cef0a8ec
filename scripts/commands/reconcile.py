"""`draftquant reconcile`: what a server accepted against what replay says of the same prompts."""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.hub import resolve_draft
from ...quantize.files.report_files import write_reports
from ..console import print_json, print_table, progress_bar, stdout, table
from .common import add_device, add_target, shared_tables
from .report_outputs import add_overwrite, check_report_file

if TYPE_CHECKING:
    import torch

    from ...calibration.traces.target_tables import SharedTables
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.served.reconciliation import Reconciliation
    from ...validate.served.reconciling_folder import KeptPlaces

SHOWN = 20
"""Differences that are printed; the report has all."""

OF_ROUNDS = {
    "K": "the server proposed fewer than K tokens",
    "kernel": "a near tie of the draft's logits, which kernels settle either way",
    "draft": "the server had another draft",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`reconcile TRACES R --draft D`."""
    parser.add_argument("traces", type=Path, metavar="TRACES", help="recorded from the target")
    parser.add_argument("measured", type=Path, metavar="MEASUREMENT", help="what `measure` wrote")
    parser.add_argument("--draft", required=True, metavar="DRAFT", help="that was served")
    add_target(parser)
    add_device(parser)
    parser.add_argument(
        "--max-gap",
        type=float,
        metavar="NATS",
        help="nats between two tokens of the target up to which either may be written (default"
        " 0.5: four BF16 steps of a logit in [16, 32))",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="PROMPTS",
        help="only the first so many of the measurement that the traces hold",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="F.json",
        help="also write the JSON report here; what is replayed is kept beside it, and a run that"
        " was killed goes on with the same command",
    )
    add_overwrite(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`; 0 = all is explained, 1 = something is not, 3 = not known of some."""
    from ...calibration.passes.devices import resolve_device
    from ...calibration.traces.trace_folder import TraceFolder
    from ...validate.errors import MeasureError
    from ...validate.judging.candidate_origin import DraftFolder
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.divergence_findings import LARGEST_NOISE
    from ...validate.served.reconciliation import check_reconcilable, reconcile

    check_report_file(options)
    max_gap = LARGEST_NOISE if options.max_gap is None else options.max_gap
    if not max_gap >= 0:
        raise MeasureError("--max-gap", f"expected nats of at least 0, got {max_gap}",
                           fix="leave it out")  # fmt: skip
    if options.limit is not None and options.limit < 1:
        raise MeasureError("--limit", f"expected at least 1, got {options.limit}",
                           fix="leave it out for all prompts")  # fmt: skip
    measurement = read_measurement(options.measured)
    traces = TraceFolder.open(options.traces)
    speculation = check_reconcilable(measurement, traces)
    folder = resolve_draft(options.draft).folder
    served, known = speculation.draft_sha256, DraftFolder.read(folder).sha256
    device = resolve_device(options.device)
    tables = shared_tables(traces, options.target, device)
    drafts = _in_both_dtypes(folder, traces, tables, device)
    with (
        _kept(options.report, options.measured, traces, known) as kept,
        progress_bar("reconcile", len(measurement.records)) as bar,
    ):
        found = reconcile(
            measurement,
            traces,
            drafts,
            tables=tables,
            max_gap=max_gap,
            other_draft=None if served is None else served != known,
            limit=options.limit,
            kept=kept,
            on_progress=bar.set,
        )
    if options.report:
        text = json.dumps(found.to_mapping(), indent=2) + "\n"
        write_reports({options.report: text}, overwrite=options.overwrite)
    if kept is not None:
        shutil.rmtree(kept.folder, ignore_errors=True)
    if options.json:
        print_json(found.to_mapping())
    else:
        print_reconciliation(found)
    return found.exit_code


@contextmanager
def _kept(
    report: Path | None, measured: Path, traces: "TraceFolder", draft_sha256: str
) -> "Iterator[KeptPlaces | None]":
    """Where the prompts that are replayed are kept until there is a report.

    Raises:
        OutputError: those of another reconciliation are there, or another process is at it.
    """
    from ...calibration.traces.trace_folder import file_sha256
    from ...quantize.files.resumable import resumable_folder
    from ...validate.served.reconciling_folder import RECONCILING, KeptPlaces

    if report is None:
        yield None
        return
    folder = report.with_name(f"{report.name}.{RECONCILING}")
    plan = {
        "measurement_sha256": file_sha256(measured),
        "traces_sha256": traces.sha256,
        "draft_sha256": draft_sha256,
    }
    with resumable_folder(folder, RECONCILING, plan):
        kept = KeptPlaces(folder=folder)
        try:
            yield kept
        finally:
            if kept.empty:
                shutil.rmtree(folder, ignore_errors=True)


def _in_both_dtypes(
    folder: Path, traces: "TraceFolder", tables: "SharedTables", device: "torch.device"
) -> "tuple[LoadedDraft, LoadedDraft]":
    """As engines compute, and exactly.

    Raises:
        DeviceError: too little memory.
        CheckpointError, VerifyError: see `load_draft`.
    """
    import torch

    from ...calibration.passes.memory import estimate_replay
    from ...quantize.stored.loading import load_draft

    estimate_replay(
        [folder, folder],
        traces,
        dtype=torch.float32,
        device=device,
        num_draft_tokens=None,
        batch_size=None,
    ).check()
    as_served, exact = (
        load_draft(folder, dtype=dtype, device=device, compact=True, shared=tables)
        for dtype in (torch.bfloat16, torch.float32)
    )
    return as_served, exact


def print_reconciliation(found: "Reconciliation") -> None:
    """Print the figures over all prompts, the first differences, and what they come to."""
    out, prompts = stdout(), found.prompts
    numbers = ("acceptance length", "rounds")
    lengths = table(
        f"{found.name}, K = {found.num_draft_tokens}, {len(prompts)} prompts",
        "",
        *numbers,
        right=numbers,
    )
    for name, counts in found.totals.items():
        length = f"{counts.mean_acceptance_length:.4f}" if counts.num_steps else ""
        lengths.row(name, length, f"{counts.num_steps:,}")
    print_table(lengths)
    compared = sum(prompt.num_compared for prompt in prompts)
    equal = sum(prompt.num_equal for prompt in prompts)
    beyond = sum(prompt.num_beyond for prompt in prompts)
    out.line(
        f"{equal:,} of {compared:,} rounds in common text are equal; replay does not count"
        f" {beyond:,} more, behind that text or at its end"
    )
    _print_differences(found)
    outcomes = [prompt.outcome for prompt in prompts]
    said = ", ".join(
        f"{outcomes.count(name)} {name}"
        for name in ("equal", "explained", "not known", "unexplained")
        if name in outcomes
    )
    out.line(f"prompts: {said}")
    if "not known" in outcomes:
        out.line(
            "  how near a tie was, traces with log-probabilities know (record --logprobs"
            " --top-logprobs 8), or a measurement with them (measure --top-logprobs 2)"
        )
    if found.other_draft:
        out.line(("warning:", "yellow"), " the server had another draft than the one replayed")
    if found.other_draft is None:
        out.line(
            ("warning:", "yellow"),
            " the measurement does not say which draft was served (measure --draft)",
        )
    if found.num_left_out:
        out.line(f"{found.num_left_out} more prompts that both hold are left out (--limit)")
    if found.num_not_recorded:
        out.line(
            ("warning:", "yellow"),
            f" {found.num_not_recorded} prompts of the measurement are not in the traces",
        )


def _print_differences(found: "Reconciliation") -> None:
    """Rounds that are explained by their number, everything else one by one, the worst first."""
    ranks = {False: 0, None: 1, True: 2}
    words = {False: "unexplained", None: "not known", True: "explained"}
    rows = [(prompt.id, one) for prompt in found.prompts for one in prompt.differences]
    explained = Counter(one.kind for _, one in rows if one.explained and one.kind in OF_ROUNDS)
    for kind, count in sorted(explained.items()):
        stdout().line(f"{count:,} of the others are explained: {OF_ROUNDS[kind]}")
    told = [row for row in rows if not (row[1].explained and row[1].kind in OF_ROUNDS)]
    if not told:
        return
    told.sort(key=lambda row: ranks[row[1].explained])
    more = f", the first {SHOWN} of {len(told)}" if len(told) > SHOWN else ""
    shown = table(f"Differences{more}", "prompt", "token", "kind", "what", "")
    for name, one in told[:SHOWN]:
        position = "" if one.position is None else str(one.position)
        shown.row(name, position, one.kind, one.what, words[one.explained])
    print_table(shown)
