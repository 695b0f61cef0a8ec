"""`draftquant record`: what a target does on prompts, for calibration and replay."""

import argparse
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.record import record_as, server_command
from ..api.record_settings import RecordSettings, Turns
from ..console import OnTerminal, megabytes, print_document, print_json, stdout
from .common import add_device, add_sampling, comma_numbers
from .record_engine import add_engine_arguments
from .traces_written import print_written, written

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`record --target M --prompts P --out T`."""
    from ...calibration.recording.prompt_fit import TooLong
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
        choices=typing.get_args(Turns),
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
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="continue each prompt to --max-new-tokens, behind the target's end of text",
    )
    parser.add_argument(
        "--too-long",
        choices=typing.get_args(TooLong),
        default="error",
        help="prompts that leave too few positions for their answer: name them all and stop, leave"
        " them out, or keep their last tokens (default error)",
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
    from ...calibration.errors import TraceError

    settings = _settings(options)
    settings.check(starts_server=options.print_server_args)
    if options.print_server_args:
        command = server_command(settings, options.target, options.prompts, OnTerminal())
        if options.json:
            print_json({"command": command})
        else:
            print_document(command)
        return 0
    if not options.out:
        raise TraceError(
            "--out",
            "expected the folder to create",
            fix="add --out FOLDER, such as --out ./gate-traces",
        )
    traces = record_as(settings, options.target, options.prompts, options.out, OnTerminal())
    if options.json:
        print_json(written(traces))
    else:
        _print_traces(traces)
    return 0


def _settings(options: argparse.Namespace) -> RecordSettings:
    return RecordSettings(
        draft=options.draft,
        fused=options.fused,
        aux_layer_ids=options.aux_layers,
        tables=options.tables,
        table_ids=options.table_ids or (),
        turns=options.turns,
        too_long=options.too_long,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        dtype=options.dtype,
        batch_size=options.batch_size,
        device=options.device,
        device_map=options.device_map,
        engine=options.engine,
        engine_args=dict(options.engine_arg or ()),
        server=options.server,
        shared=options.shared,
    )


def _print_traces(traces: "TraceFolder") -> None:
    print_written(traces)
    if tables := traces.manifest.tables:
        head = f"{traces.manifest.target.vocab_size:,} x {tables.width:,}"
        stdout().line(
            f"{tables.file}: embedding {tables.num_token_ids:,} x {tables.width:,}, head {head},"
            f" {megabytes(tables.nbytes)}"
        )
