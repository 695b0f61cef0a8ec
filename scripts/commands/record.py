"""`draftquant record`: what a target does on prompts, for calibration and replay."""

import argparse
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.drafts import read_config
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.hub import resolve_draft
from ..console import megabytes, note, print_json, progress_bar, stdout
from .common import add_device, add_sampling, comma_numbers
from .record_engine import (
    HowToRecord,
    add_engine_arguments,
    check_engine,
    print_server_command,
    record_from_engine,
)
from .traces_written import print_written, written

if TYPE_CHECKING:
    from ...calibration.prompts.prompt_file import Prompt
    from ...calibration.recording.conversations import Record
    from ...calibration.traces.folder import TraceFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`record --target M --prompts P --out T`."""
    from ...calibration.traces.manifest import FeatureDtype

    parser.add_argument(
        "--target",
        required=True,
        type=Path,
        metavar="TARGET",
        help="transformers folder of the target (safetensors, no remote code)",
    )
    parser.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="PROMPTS",
        help='JSON lines: {"id", "category", and token_ids, text or messages}; also files of'
        " MT-Bench, ShareGPT and SPEED-Bench (parquet too)",
    )
    parser.add_argument(
        "--turns",
        choices=("first", "all"),
        default="first",
        help="of conversations: all = the target answers each turn on top of its own answers"
        " (default first)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="read the target layers, and the mask token, from this draft's config",
    )
    parser.add_argument(
        "--fused",
        action="store_true",
        help="store the features after the draft's fc: narrower, for drafts with the same fc only",
    )
    parser.add_argument(
        "--aux-layers",
        metavar="LAYER,...",
        type=comma_numbers,
        help="target layers whose outputs are recorded, 0-based",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="carry the target's embedding and head too: drafts without them then need no target",
    )
    parser.add_argument(
        "--table-ids",
        metavar="TOKEN_ID,...",
        type=comma_numbers,
        help="tokens whose embedding is carried beside those of the traces and DRAFT's mask token",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="TOKENS",
        help="of each answer (default 128)",
    )
    add_sampling(parser)
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="keep log-probabilities of emitted tokens; of drawn ones they are always kept",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="TOKENS",
        help="keep the N most likely tokens too",
    )
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(FeatureDtype),
        help="what the target computes in (default float32, of an engine bfloat16)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="PROMPTS",
        help="prompts run together, or handed to an engine at a time (default 32)",
    )
    add_device(parser)
    parser.add_argument(
        "--device-map",
        choices=("auto",),
        help="spread a target that is too large for one GPU over all of them, then the CPU and the"
        " disk (needs accelerate)",
    )
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from transformers.utils import logging

    from ...calibration.errors import TraceError
    from ...calibration.prompts.prompt_file import read_prompts

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # missing weights are our error
    check_engine(options)
    options.dtype = options.dtype or ("float32" if options.engine == "transformers" else "bfloat16")
    if options.fused and not options.draft:
        raise TraceError("--fused", "needs the draft whose fc is applied", fix="add --draft DRAFT")
    if options.table_ids and not options.tables:
        raise TraceError("--table-ids", "says which rows the tables carry", fix="add --tables")
    how = _how(options)
    prompts = read_prompts(options.prompts, target=options.target)
    longer = sum(bool(prompt.later_turns) for prompt in prompts)
    if longer and options.turns == "first":
        note(
            f"{options.prompts}: {longer} of {len(prompts)} prompts have later turns of the user,"
            " which follow the target's answer: the first turn is recorded (--turns all: each)"
        )
    if options.print_server_args:
        return print_server_command(how, prompts, options)
    with progress_bar("record", len(prompts)) as bar:

        def record(some: "Sequence[Prompt]", out: Path) -> "TraceFolder":
            if options.engine == "vllm":
                return record_from_engine(how, some, options, out, bar.set)
            return _record_with_transformers(how, some, options, out, bar.set)

        if options.turns == "all":
            traces = _all_turns(options, prompts, record)
        else:
            traces = record(prompts, options.out)
    if options.json:
        print_json(written(traces))
    else:
        _print_traces(traces)
    return 0


def _how(options: argparse.Namespace) -> HowToRecord:
    """What is recorded, whoever runs the target."""
    import torch

    from ...calibration.passes.devices import resolve_device
    from ...calibration.passes.draft_inputs import mask_token_ids
    from ...calibration.recording.decoding import Decoding
    from ...calibration.traces.target_tables import TargetTables
    from ...quantize.stored.loading import load_draft

    device = resolve_device(options.device)
    aux_layer_ids, fuse_with = options.aux_layers, None
    table_ids = options.table_ids or ()
    if options.draft:
        folder = resolve_draft(options.draft).folder
        _, geometry = read_config(Checkpoint.open(folder))
        aux_layer_ids = aux_layer_ids or geometry.aux_layer_ids
        table_ids += mask_token_ids(geometry)
        if options.fused:
            dtype = getattr(torch, options.dtype)
            shared = TargetTables.find(options.target).shared(None, device)
            fuse_with = load_draft(folder, dtype=dtype, device=device, compact=True, shared=shared)
    return HowToRecord(
        decoding=Decoding(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            logprobs=options.logprobs,
            num_top_logprobs=options.top_logprobs,
        ),
        aux_layer_ids=aux_layer_ids,
        fuse_with=fuse_with,
        table_ids=table_ids if options.tables else None,
        device=device,
    )


def _record_with_transformers(
    how: HowToRecord,
    prompts: "Sequence[Prompt]",
    options: argparse.Namespace,
    out: Path,
    on_progress: Callable[[int, int], None],
) -> "TraceFolder":
    from ...calibration.recording.record import record_traces
    from ...calibration.recording.target_model import Placement

    return record_traces(
        options.target,
        prompts,
        out,
        max_new_tokens=options.max_new_tokens,
        decoding=how.decoding,
        aux_layer_ids=how.aux_layer_ids,
        fuse_with=how.fuse_with,
        dtype=options.dtype,
        batch_size=options.batch_size,
        placement=Placement(device=how.device, device_map=options.device_map),
        table_ids=how.table_ids,
        on_progress=on_progress,
    )


def _print_traces(traces: "TraceFolder") -> None:
    print_written(traces)
    if tables := traces.manifest.tables:
        head = f"{traces.manifest.target.vocab_size:,} x {tables.width:,}"
        stdout().line(
            f"{tables.file}: embedding {tables.num_token_ids:,} x {tables.width:,}, head {head},"
            f" {megabytes(tables.nbytes)}"
        )


def _all_turns(
    options: argparse.Namespace, prompts: "Sequence[Prompt]", record: "Record"
) -> "TraceFolder":
    """Record conversations, and say how far they went."""
    from ...calibration.recording.conversations import record_conversations

    report = record_conversations(
        prompts, options.target, options.out, record, max_new_tokens=options.max_new_tokens
    )
    turns = ", ".join(f"{count} prompts" for count in report.num_turns)
    note(f"turn by turn: {turns}")
    if report.num_cut_short:
        note(
            f"{report.num_cut_short} conversations end before their last turn, which the target"
            " has no positions for"
        )
    return report.traces
