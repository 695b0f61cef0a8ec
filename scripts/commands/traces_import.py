"""`draftquant traces import`: hidden states that a trainer or vLLM dumped become traces."""

import argparse
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quantize.files.hub import resolve_draft
from ..console import print_json, progress_bar, stdout
from .common import comma_numbers
from .traces_written import print_written, written

if TYPE_CHECKING:
    from ...calibration.dumps.findings import ImportReport
    from ...quantize.stored.loading import LoadedDraft


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`traces import --from F DUMP --target M --out T`."""
    from ...calibration.dumps.dump_formats import DumpFormat

    parser.add_argument("dump", type=Path, metavar="DUMP", help="folder of the dump")
    parser.add_argument(
        "--from",
        dest="written_by",
        required=True,
        choices=typing.get_args(DumpFormat),
        help="who wrote it (vllm: its ExampleHiddenStatesConnector)",
    )
    parser.add_argument(
        "--target",
        required=True,
        type=Path,
        metavar="TARGET",
        help="folder of the target that was dumped: its head shows whether answers are its own;"
        " where it runs here, a few positions are recomputed and show which layers these are",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="folder to create"
    )
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="that reads these features: says which layers are expected, and settles their order"
        " where the target does not run here",
    )
    parser.add_argument(
        "--aux-layers",
        metavar="LAYER,...",
        type=comma_numbers,
        help="layers that the dump should hold, 0-based, counted after the layer",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="PROMPTS",
        help="prompt file that the dump was made with: ids, categories, and where prompts end if"
        " the dump has no loss mask",
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="the answers are the target's own at temperature 0, for dumps without the last states"
        " that would show it",
    )
    parser.add_argument(
        "--leave-out-off-policy",
        action="store_true",
        help="leave out answers that the target would not have given, and say how many",
    )
    parser.add_argument(
        "--tables", action="store_true", help="carry the target's embedding and head, as record"
    )
    parser.add_argument(
        "--table-ids",
        metavar="TOKEN_ID,...",
        type=comma_numbers,
        help="tokens whose embedding is carried beside those of the traces and DRAFT's mask token",
    )


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from transformers.utils import logging

    from ...calibration.dumps.dump_conventions import Declared
    from ...calibration.dumps.import_dump import import_dump
    from ...calibration.errors import TraceError
    from ...calibration.passes.draft_inputs import mask_token_ids
    from ...calibration.prompts.prompt_file import read_prompts

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    if options.table_ids and not options.tables:
        raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")
    draft = _load(options) if options.draft else None
    table_ids = options.table_ids or ()
    if draft:
        table_ids += mask_token_ids(draft.geometry)
    prompts = read_prompts(options.prompts, target=options.target) if options.prompts else None
    with progress_bar("import", 1) as bar:
        report = import_dump(
            options.written_by,
            options.dump,
            options.target,
            options.out,
            declared=Declared(layer_ids=options.aux_layers, draft=draft, greedy=options.greedy),
            prompts=prompts,
            leave_out_off_policy=options.leave_out_off_policy,
            table_ids=table_ids if options.tables else None,
            on_progress=bar.set,
        )
    if options.json:
        print_json(_mapping(report))
    else:
        _print(report)
    return 0


def _load(options: argparse.Namespace) -> "LoadedDraft":
    from ...calibration.traces.target_tables import SharedTables, TargetTables
    from ...quantize.errors import CheckpointError
    from ...quantize.stored.loading import load_draft

    try:
        shared = TargetTables.find(options.target).shared()
    except CheckpointError:  # a config alone; a draft with tables of its own needs none
        shared = SharedTables({})
    return load_draft(resolve_draft(options.draft).folder, shared=shared)


def _print(report: "ImportReport") -> None:
    print_written(report.traces, f" of {report.num_samples} texts")
    for sentence in report.layout.sentences():
        stdout().line(f"  {sentence}")
    if report.num_off_policy:
        stdout().line(
            f"  {report.num_off_policy} answers left out: the target would not have given them"
        )
    if report.num_without_answer:
        stdout().line(f"  {report.num_without_answer} texts without an answer")


def _mapping(report: "ImportReport") -> dict[str, Any]:
    return written(report.traces) | {
        "texts": report.num_samples,
        "findings": list(report.layout.sentences()),
        "left_out_off_policy": report.num_off_policy,
        "without_answer": report.num_without_answer,
    }
